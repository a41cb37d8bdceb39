"""Reading, judging and writing checkpoints."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api import EngineError
from engine.cli import main
from engine.config import ModelConfig
from engine.convert import ConvertError, official_tensors
from engine.model import names
from engine.model.checkpoint import Checkpoint, CheckpointError, load_model
from engine.model.writer import save_checkpoint
from tests.engine.model import build
from tests.engine.model.drive import run, tokens


@pytest.mark.parametrize("storage", ["f32", "bf16", "fp8", "fp4"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("make", [build.v4, build.v41])
def test_what_is_written_is_read_back(tmp_path, make, shards, storage):
    """Every tensor comes back with the values its storage can hold."""
    config = make(quantised=True)
    tensors = build.random_tensors(config)
    build.write(tmp_path, config, storage=storage, shards=shards, tensors=tensors)
    checkpoint = Checkpoint(tmp_path)
    tolerance = {"f32": 0.0, "bf16": 2**-8, "fp8": 2**-4, "fp4": 0.26}[storage]

    assert checkpoint.problems() == []
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1, "all as the config is"
    specs = names.tensor_specs(checkpoint.config)
    assert set(tensors) == set(specs)
    for name, want in tensors.items():
        if specs[name].role == "table":  # read row by row
            continue
        got = checkpoint.get(name)
        assert got.shape == want.shape
        exact = storage == "f32" or specs[name].role in ("float32", "ids")
        bound = 0.0 if exact else tolerance * float(want.abs().max())
        assert float((got - want).abs().max()) <= bound, name


@pytest.mark.parametrize("make", [build.v4, build.v41])
def test_packed_weights_run_as_their_values(tmp_path, make):
    """A model of FP8 and FP4 weights equals one of the same values stored in float32."""
    config = make(quantised=True)
    packed = build.write(tmp_path / "packed", config, storage="fp4")
    checkpoint = Checkpoint(packed)
    specs = names.tensor_specs(checkpoint.config)
    values = {name: checkpoint.get(name) for name in specs if specs[name].role != "table"}
    for name in specs:
        if specs[name].role == "table":
            table = checkpoint.table(name.removesuffix("embed.weight"))
            rows = np.arange(specs[name].shape[0])[:, None]
            values[name] = table.lookup(rows, torch.float32)
    plain = build.write(tmp_path / "plain", config, tensors=values)
    ids = tokens(30, 0)

    want = run(load_model(plain, round_trips="off"), ids)
    assert torch.equal(run(load_model(packed, round_trips="off"), ids), want)


def test_round_trips_follow_the_configuration(tmp_path):
    """auto rounds iff config.json has a quantization_config; on and off decide themselves."""
    plain = build.write(tmp_path / "plain", build.v41())
    packed = build.write(tmp_path / "packed", build.v41(quantised=True), storage="fp4")
    ids = tokens(30, 0)

    assert not load_model(plain).round_trips
    assert load_model(packed).round_trips
    assert load_model(plain, round_trips="on").round_trips
    assert not load_model(packed, round_trips="off").round_trips
    rounded, exact = (run(load_model(packed, round_trips=m), ids) for m in ("on", "off"))
    assert 1e-3 < float((rounded - exact).abs().mean()) < 0.5 * float(exact.std())


def _rewrite(path, change):
    """Apply `change` to the tensors of a one-file checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _put(name, value):
    return lambda tensors: tensors.update({name: value})


BROKEN = [
    ("norm.weight: missing, expected [64]", lambda t: t.pop("norm.weight")),
    (
        "layers.0.attn.wq_b.weight: expected [128, 32] BF16, got [127, 32]",
        _put("layers.0.attn.wq_b.weight", torch.zeros(127, 32, dtype=torch.bfloat16)),
    ),
    (
        "layers.1.ffn.gate.weight: expected one of BF16, F32, got I64",
        _put("layers.1.ffn.gate.weight", torch.zeros(6, 64, dtype=torch.int64)),
    ),
    (
        "layers.0.ffn.gate.tid2eid: expected one of I64, I32, got F32",
        _put("layers.0.ffn.gate.tid2eid", torch.zeros(288, 2)),
    ),
    (
        "layers.0.attn.wkv.weight: expected one of BF16, F32, F8_E4M3, got I8",
        _put("layers.0.attn.wkv.weight", torch.zeros(32, 32, dtype=torch.int8)),
    ),
    ("layers.9.mystery: unknown, F32 [3]", _put("layers.9.mystery", torch.zeros(3))),
    (
        "layers.0.attn.wkv.scale: missing, expected [1, 1] for F8_E4M3 layers.0.attn.wkv.weight",
        lambda t: t.pop("layers.0.attn.wkv.scale"),
    ),
    (
        "layers.0.attn.wkv.scale: expected [1, 1] F8_E8M0 or U8, got [1, 2] F8_E8M0",
        _put("layers.0.attn.wkv.scale", torch.zeros(1, 2).to(torch.float8_e8m0fnu)),
    ),
    (
        "layers.0.attn.wkv.scale: expected [1, 1] F8_E8M0 or U8, got [1, 1] F32",
        _put("layers.0.attn.wkv.scale", torch.ones(1, 1)),
    ),
    (
        "layers.2.ffn.experts.5.w1.scale: expected [32, 2] F8_E8M0 or U8, got [32, 1] F8_E8M0",
        _put("layers.2.ffn.experts.5.w1.scale", torch.zeros(32, 1).to(torch.float8_e8m0fnu)),
    ),
    ("norm.scale: unknown", _put("norm.scale", torch.ones(1, 1))),
    ("mtp.0.e_proj.weight: missing", lambda t: t.pop("mtp.0.e_proj.weight")),
    (
        "hc_head_fn: expected [4, 256] F32, got [4, 255]",
        _put("hc_head_fn", torch.zeros(4, 255)),
    ),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return build.write(tmp_path_factory.mktemp("packed"), build.v4(quantised=True), storage="fp4")


@pytest.mark.parametrize(("message", "change"), BROKEN, ids=[m for m, _ in BROKEN])
def test_a_broken_tensor_is_named(tmp_path, packed, message, change):
    """Missing, misshapen, mistyped and unknown tensors are named with expected and seen."""
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    _rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)

    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_all_broken_tensors_are_named_at_once(tmp_path, capsys):
    """One error lists every problem, and `inspect` prints them and exits 1."""
    build.write(tmp_path, build.v4())

    def change(tensors):
        del tensors["norm.weight"], tensors["embed.weight"]
        tensors["extra"] = torch.zeros(1)

    _rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert sorted(p.split(":")[0] for p in caught.value.problems) == [
        "embed.weight",
        "extra",
        "norm.weight",
    ]
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("problem   ") == 3


def test_a_checkpoint_of_another_width_is_told_in_a_line(tmp_path):
    """The error shows the first problems and how many more there are; it holds them all."""
    folder = build.write(tmp_path, build.v4())
    config = orjson.loads((folder / "config.json").read_bytes())
    config["hidden_size"] *= 2
    (folder / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)

    problems = caught.value.problems
    assert len(problems) > 20
    assert str(caught.value) == f"{folder}: {'; '.join(problems[:8])}; and {len(problems) - 8} more"


def test_packed_weights_need_a_block_size(tmp_path, packed):
    """FP8 without quantization_config cannot be read: nobody says which block a scale covers."""
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_bytes(orjson.dumps(build.v4()))
    with pytest.raises(CheckpointError, match=r"needs quantization_config\.weight_block_size"):
        load_model(tmp_path)


def test_scales_may_be_plain_bytes(tmp_path, packed):
    """Files from before the e8m0 type hold the same bytes as uint8."""
    want = Checkpoint(packed).get("layers.0.attn.wkv.weight")
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def change(tensors):
        for name in list(tensors):
            if name.endswith(".scale"):
                tensors[name] = tensors[name].view(torch.uint8)

    _rewrite(tmp_path, change)
    load_model(tmp_path)

    assert torch.equal(Checkpoint(tmp_path).get("layers.0.attn.wkv.weight"), want)


def test_damaged_files_are_named(tmp_path):
    """Absent, foreign, cut and doubled files are told apart."""
    (tmp_path / "config.json").write_bytes(orjson.dumps(build.v4()))
    with pytest.raises(CheckpointError, match=r"expected model\*\.safetensors, got no such file"):
        Checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    for garbage in (b"", b"abc", b"x" * 100, (8).to_bytes(8, "little") + b"not json"):
        file.write_bytes(garbage)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
            Checkpoint(tmp_path)
    build.write(tmp_path, build.v4())
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"ends at byte \d+ of model\.safetensors"):
        Checkpoint(tmp_path)
    file.write_bytes(whole)
    (tmp_path / "model-2.safetensors").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"tid2eid: in .* and model\.safetensors; .*more$"):
        Checkpoint(tmp_path)


def test_an_index_that_lies_is_refused(tmp_path):
    """Each name must lie in the file that model.safetensors.index.json says."""
    build.write(tmp_path, build.v4(), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = orjson.loads(path.read_bytes())
    index["weight_map"] |= {"embed.weight": "model-00002-of-00002.safetensors", "ghost": "x"}
    path.write_bytes(orjson.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert caught.value.problems == (
        "embed.weight: expected in model-00002-of-00002.safetensors by the index, got "
        "model-00001-of-00002.safetensors",
        "ghost: expected in x by the index, got nothing",
    )
    path.write_bytes(b"[]")
    with pytest.raises(CheckpointError, match="expected an object with weight_map"):
        Checkpoint(tmp_path)


def test_what_is_not_run_is_named_with_its_reason(tmp_path):
    """Draft stages, a routing bias nobody needs and the vision tower are present but not run."""
    config = build.v41()
    config["vision_config"] = {"num_hidden_layers": 1}
    tensors = build.random_tensors(config) | {
        "vision.patch.weight": torch.zeros(2, 2),
        "aligner.w1.weight": torch.zeros(2, 2),
        "image_start": torch.zeros(64),
    }
    model = load_model(build.write(tmp_path, config, tensors=tensors))

    assert {n for n, why in model.unused.items() if why == names.VISION_UNUSED} == {
        "vision.patch.weight",
        "aligner.w1.weight",
        "image_start",
    }
    biases = {n for n in tensors if n.endswith("gate.bias_vl")}
    assert {n for n, why in model.unused.items() if why == names.BIAS_VL_UNUSED} == biases
    confidence = {"mtp.1.confidence_head.proj.weight"}
    assert {n for n, why in model.unused.items() if why == names.CONFIDENCE_UNUSED} == confidence
    drafts = {n for n in tensors if n.startswith("mtp.")} - biases - confidence
    assert {n for n, why in model.unused.items() if why == names.DSPARK_UNUSED} == drafts
    assert len(model.unused) == 4 + len(drafts) + len(biases)
    assert not model.has_vision
    assert "does not implement the vision tower" in model.vision_reason


#: One layer of each kind, so that nothing is tried twice.
SMALLEST = {
    "v4": build.v4(num_hidden_layers=4, compress_ratios=[0, 4, 16, 4, 0], num_hash_layers=1),
    "v41": build.v41(
        image=True,
        num_hidden_layers=5,
        compress_ratios=[0, 2, 1, 1, 1, 0, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 4],
        candidate_source_layer_id=2,
        engram_layer_ids=[1],
        dspark_target_layer_ids=[2, 3, 4],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALLEST)
def test_every_other_tensor_changes_the_logits(tmp_path, kind):
    """No tensor is loaded and then forgotten: changing any of them moves a logit."""
    config = SMALLEST[kind]
    tensors = build.random_tensors(config)
    model = load_model(build.write(tmp_path, config, tensors=tensors))
    ids = [*tokens(36, 4), *[5] * 8]  # id 5 is the image token
    splits = [len(ids) - 2, 1, 1]
    want = run(model, ids, splits)
    generator = torch.Generator().manual_seed(0)
    unmoved = []
    for name in sorted(set(tensors) - set(model.unused)):
        if ".experts." in name and ".experts.0." not in name:
            continue  # what holds for one of them holds for all
        changed = tensors[name]
        if changed.dtype == torch.int64:
            changed = (changed + 1) % 6
        elif "gate.bias" in name:  # only an order can change
            changed = torch.linspace(5, -5, len(changed))
        else:  # not by one factor, which a norm behind it would undo
            changed = changed * (0.25 + 1.5 * torch.rand(changed.shape, generator=generator))
        save_file(tensors | {name: changed.contiguous()}, tmp_path / "model.safetensors")
        moved = run(load_model(tmp_path), ids, splits)
        if not float((moved - want).abs().max()) > 1e-4:
            unmoved.append(name)
    assert unmoved == []


def test_the_engram_table_stays_on_disk(tmp_path):
    """The table is the mapped file itself, in its stored type; only looked-up rows are read."""
    build.write(tmp_path, build.v41(), storage="bf16")
    checkpoint = Checkpoint(tmp_path)
    table = checkpoint.table("layers.1.engram.")
    mapped = checkpoint._maps[tmp_path / "model.safetensors"]

    assert table.weight.dtype == torch.bfloat16
    assert np.shares_memory(table.weight.view(torch.uint8).numpy(), mapped)


def test_engram_without_a_tokenizer_is_refused(tmp_path):
    """Token ids cannot be folded without the vocabulary."""
    build.write(tmp_path, build.v41())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"tokenizer\.json: Engram needs"):
        load_model(tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path):
    """The compute dtypes are named."""
    with pytest.raises(EngineError, match=r"dtype: expected one of torch\.float32.*float16"):
        load_model(tmp_path, dtype=torch.float16)


def test_the_writer_refuses_what_the_loader_would(tmp_path):
    """Missing, misshapen and unknown tensors do not reach the disk."""
    config = build.v4()
    tensors = build.random_tensors(config)
    del tensors["norm.weight"]
    tensors |= {"embed.weight": torch.zeros(3, 3), "extra": torch.zeros(1)}
    with pytest.raises(ValueError, match="cannot write checkpoint") as caught:
        save_checkpoint(tmp_path, config, tensors)
    for part in (
        "norm.weight: expected [64], got nothing",
        "embed.weight: expected [288, 64], got [3, 3]",
        "extra: unknown",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"needs quantization_config\.weight_block_size"):
        save_checkpoint(tmp_path, config, build.random_tensors(config), storage="fp8")
    assert list(tmp_path.iterdir()) == []


def test_flash_names_count_as_published():
    """V4-Flash has the published number of parameters: 284.3 B, and 6.6 B in its MTP stage."""
    from tests.engine.model.test_config import FLASH

    specs = names.tensor_specs(ModelConfig.from_dict(FLASH))
    size = {
        part: sum(
            np.prod(s.shape, dtype=np.int64)
            for n, s in specs.items()
            if n.startswith("mtp.") == part and s.role != "ids"
        )
        for part in (False, True)
    }
    assert round(size[False] / 1e9, 1) == 284.3
    assert round(size[True] / 1e9, 1) == 6.6


def test_unknown_transformers_names_are_listed():
    """What save_pretrained writes is not what the converter reads, and it says so."""
    state = {"model.norm.weight": torch.zeros(1), "model.layers.0.attn.norm.weight": torch.zeros(1)}
    with pytest.raises(
        ConvertError, match=r"unknown tensors: model\.layers\.0\.attn\.norm\.weight"
    ):
        official_tensors(state)


@pytest.mark.parametrize("change", ["nothing", "weights", "config", "tokenizer", "type"])
def test_the_fingerprint_names_config_and_weights(tmp_path, change):
    """Equal checkpoints have equal fingerprints in any folder; what changes the state changes it."""
    config = build.v41()
    first = Checkpoint(build.write(tmp_path / "first", config, seed=1)).fingerprint()
    if change == "config":
        config["text_config"]["rope_theta"] = 20000.0
    seed, storage = 2 if change == "weights" else 1, "bf16" if change == "type" else "f32"
    path = build.write(tmp_path / "second", config, seed=seed, storage=storage)
    if change == "tokenizer":
        (path / "tokenizer.json").write_text("{}")

    assert (Checkpoint(path).fingerprint() == first) == (change == "nothing")
