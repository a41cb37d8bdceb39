"""Reading config.json: what is served, what is refused and how."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine import TINY_CHECKPOINT
from engine.config import ConfigError, ModelConfig
from tests.engine.model import build

FLASH: dict[str, Any] = build.v4(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    sliding_window=128,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    compress_ratios=[0, 0, *[4, 128] * 20, 4, 0],
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    max_position_embeddings=1048576,
    quantised=True,
)
FLASH_41: dict[str, Any] = build.v41(
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    compress_ratios=[0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    kv_source_layer_ids=[2, 8, 14, 20],
    index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    engram_layer_ids=[1, 14],
    engram_num_embeddings=[384006168, 384016682],
    engram_n_heads=8,
    engram_head_dim=256,
    engram_vocab_size=16000000,
    engram_compressed_vocab_size=99092,
    num_nextn_predict_layers=3,
    dspark_target_layer_ids=[37, 38, 39],
)


def test_the_shipped_config_is_served():
    """The config of the checkpoint that ships is read as the V4.1 model it describes."""
    config = ModelConfig.from_file(TINY_CHECKPOINT)

    assert config.version == "v4.1"
    assert config.hc_sinkhorn_iters == 6
    assert [layer.index for layer in config.layers if layer.owns_entries] == [2, 3]
    assert [layer.index for layer in config.layers if layer.owns_index] == [2, 3, 6]
    assert [layer.index for layer in config.layers if layer.reads_candidates] == [6]


def test_flash_has_the_published_layer_kinds():
    """V4-Flash has 2 window, 21 CSA and 20 HCA layers, of which three are hash-routed."""
    layers = ModelConfig.from_dict(FLASH).layers

    assert sum(layer.ratio == 0 for layer in layers) == 2
    assert sum(layer.overlap and layer.owns_index for layer in layers) == 21
    assert sum(layer.ratio == 128 and not layer.owns_index for layer in layers) == 20
    assert [layer.index for layer in layers if layer.hash_routed] == [0, 1, 2]


def test_v41_flash_shares_as_published():
    """Each V4.1 layer reads the entries and the choice of the greatest source not above it."""
    layers = ModelConfig.from_dict(FLASH_41).layers

    seen = [(layer.ratio, layer.kv_source, layer.index_source) for layer in layers]
    want = [(0, None, None)] * 2
    for first, ratio in ((2, 2), (8, 2), (14, 2)):
        want += [(ratio, first, first)] * 6
    for chooser in (20, 24, 28, 32, 36):
        want += [(1, 20, chooser)] * 4
    assert want == seen
    assert [layer.index for layer in layers if layer.builds_candidates] == [20]
    assert [layer.index for layer in layers if layer.reads_candidates] == [24, 28, 32, 36]
    assert [layer.index for layer in layers if layer.engram is not None] == [1, 14]


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in names}


REFUSED = [
    ("model_type: expected ['deepseek_v4'", build.v4(model_type="llama")),
    ("hidden_size: expected an integer, got nothing", _without(build.v4(), "hidden_size")),
    ("hidden_size: expected an integer, got '64'", build.v4(hidden_size="64")),
    ("hidden_size: expected an integer, got True", build.v4(hidden_size=True)),
    ("hidden_size: expected a positive number, got -1", build.v4(hidden_size=-1)),
    ("hidden_act: expected 'silu', got 'gelu'", build.v4(hidden_act="gelu")),
    ("gate_temp: expected 1", build.v4(gate_temp=2.0)),
    ("scoring_func: expected 'sqrtsoftplus', got 'sigmoid'", build.v4(scoring_func="sigmoid")),
    ("o_groups: expected a divisor of the 4 heads, got 3", build.v4(o_groups=3)),
    ("qk_rope_head_dim: expected an even number <= 32, got 34", build.v4(qk_rope_head_dim=34)),
    ("head_dim: expected an even number, got 33", build.v4(head_dim=33)),
    ("num_experts_per_tok: expected at most 6, got 7", build.v4(num_experts_per_tok=7)),
    ("eos_token_id: expected an id below 288, got 288", build.v4(eos_token_id=[1, 288])),
    ("compress_ratios[1]: expected one of [0, 4, 8", build.v4(compress_ratios=[0, 3, 4, 4, 4, 0])),
    ("compress_ratios: expected 5 entries", build.v4(compress_ratios=[0, 4, 16, 4, 16])),
    ("compress_ratios: expected 5 entries", build.v4(compress_ratios=[0, 4, 16, 4, 16, 4])),
    ("rope_scaling.rope_type: expected 'yarn'", build.v4(rope_scaling={"type": "linear"})),
    (
        "rope_scaling.factor: expected a number",
        build.v4(rope_scaling={"type": "yarn", "original_max_position_embeddings": 9}),
    ),
    ("index_head_dim: expected a power of two", build.v4(index_head_dim=24)),
    (
        "quant_method: expected 'fp8', got 'awq'",
        build.v4(quantization_config={"quant_method": "awq"}),
    ),
    (
        "weight_block_size: expected two equal positive integers",
        build.v4(quantization_config={"weight_block_size": [128, 64]}),
    ),
    ("text_config.head_dim: expected an integer", build.v41(head_dim=None)),
    ("num_hash_layers: expected 0 for V4.1, got 1", build.v41(num_hash_layers=1)),
    (
        "kv_source_layer_ids: expected a source of ratio 2 for layer 1, got none",
        build.v41(kv_source_layer_ids=[3, 4], index_source_layer_ids=[3, 4]),
    ),
    (
        "kv_source_layer_ids: expected a source of ratio 1 for layer 4, got layer 3 of ratio 2",
        build.v41(kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3]),
    ),
    (
        "kv_source_layer_ids: expected layers with a compress ratio above 0, got 0",
        build.v41(kv_source_layer_ids=[0, 1, 3, 4], index_source_layer_ids=[0, 1, 3, 4]),
    ),
    (
        "index_source_layer_ids: expected every KV source among them, got none of [3]",
        build.v41(index_source_layer_ids=[1, 4]),
    ),
    ("index_source_layer_ids: expected ascending ids", build.v41(index_source_layer_ids=[4, 3, 1])),
    ("candidate_source_layer_id: expected an index source", build.v41(candidate_source_layer_id=5)),
    ("candidate_source_layer_id: expected a layer >=", build.v41(candidate_source_layer_id=3)),
    ("candidate_topk_blocks: expected an integer", build.v41(candidate_topk_blocks=None)),
    ("engram_num_embeddings: expected the sums", build.v41(engram_num_embeddings=[360, 600])),
    ("engram_layer_ids: expected ascending ids below 10", build.v41(engram_layer_ids=[1, 10])),
    ("engram_pad_token_id: expected an id below 288", build.v41(engram_pad_token_id=288)),
    ("engram_max_ngram_size: expected at least 2, got 1", build.v41(engram_max_ngram_size=1)),
    ("dspark_target_layer_ids: expected ids below 10", build.v41(dspark_target_layer_ids=[10])),
]


@pytest.mark.parametrize(("message", "config"), REFUSED, ids=[m for m, _ in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(message, config):
    """A bad field is named with the value accepted and the value seen."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(config)

    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_all_problems_are_reported_together():
    """A file with three faults costs one attempt, not three."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(build.v4(hc_mult=0, hidden_size=-1, o_groups=3))

    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "hidden_size",
        "hc_mult",
        "o_groups",
    ]


def test_a_missing_or_broken_file_is_named(tmp_path):
    """The path stands in the message."""
    with pytest.raises(ConfigError, match=r"config\.json: file not found"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        ModelConfig.from_file(tmp_path)


def test_yarn_is_known_under_both_spellings():
    """V4 writes rope_scaling.type, V4.1 rope_type."""
    yarn = dict(build.YARN)

    by_type = ModelConfig.from_dict(build.v4(rope_scaling={"type": "yarn", **yarn}))
    by_rope_type = ModelConfig.from_dict(build.v4(rope_scaling={"rope_type": "yarn", **yarn}))

    assert by_type.yarn == by_rope_type.yarn is not None


def test_the_configuration_loads_no_torch():
    """The gateway reads the config of what it serves in a process without a GPU stack."""
    code = (
        "import sys; from engine.config import ModelConfig; from engine import TINY_CHECKPOINT;"
        "ModelConfig.from_file(TINY_CHECKPOINT).layers;"
        "import engine.model.names; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
