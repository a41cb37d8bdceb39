"""`bathyal engine convert` and `inspect`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cli import main
from engine.model.checkpoint import Checkpoint, load_model
from engine.verify import run
from tests.engine.model import build

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
TINY = ORACLE / "golden_tiny"


def _source(tmp_path, golden, change=None):
    """A folder with the files convert expects, perhaps with changed tensors."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((golden / "config_hf.json").read_bytes())
    tensors = load_file(golden / "model_hf_names.safetensors")
    if change:
        change(tensors)
    save_file(tensors, source / "model.safetensors")
    build.tokenizer(512).save(str(source / "tokenizer.json"))
    return source


def test_a_converted_checkpoint_runs(tmp_path, capsys):
    """The official folder has the weights, the config and the tokenizer, and gives the golden logits."""
    source, target = _source(tmp_path, TINY), tmp_path / "target"

    assert main(["convert", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    assert sorted(p.name for p in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    golden = load_file(TINY / "golden.safetensors")
    logits = run(load_model(target), golden["input_ids"])["logits"]
    assert float((logits - golden["logits"]).abs().max()) <= 1e-4


def test_bfloat16_stays_bfloat16(tmp_path):
    """Weights are stored as precisely as they came, mHC and sinks in float32."""
    source = _source(
        tmp_path,
        TINY,
        lambda tensors: tensors.update(
            {n: t.bfloat16() for n, t in tensors.items() if t.is_floating_point()}
        ),
    )
    assert main(["convert", str(source), str(tmp_path / "target")]) == 0
    tensors = Checkpoint(tmp_path / "target").tensors

    assert tensors["embed.weight"].dtype == "BF16"
    assert tensors["layers.0.hc_attn_fn"].dtype == "F32"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.3.ffn_hc.fn", "layers.3.hc_ffn_fn is not zero"),
        ("model.layers.4.self_attn.compressor.position_bias", "compressor.ape is not zero"),
        ("model.layers.1.attn_hc.base", "the mHC bases differ"),
        ("model.hc_head.hc_base", "the mHC bases differ"),
    ],
)
def test_what_v41_has_not_must_be_without_effect(tmp_path, capsys, name, message):
    """Weights whose V4.1 reading would be another model are refused."""
    golden = ORACLE / "golden_v41_degenerate_r2"
    source = _source(tmp_path, golden, lambda tensors: tensors[name].add_(0.5))
    arguments = ["convert", str(source), str(tmp_path / "t"), "--architecture", "v4.1"]

    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_quantised_or_absent_sources_are_refused(tmp_path, capsys):
    """The converter reads unquantised weights of the state dict's names."""
    source = _source(
        tmp_path,
        TINY,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}
        ),
    )
    assert main(["convert", str(source), str(tmp_path / "t")]) == 2
    assert "expected unquantised weights, got torch.float8_e4m3fn" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "t")]) == 2
    assert "expected config.json and model*.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"[", "config.json: not JSON: "),
        ("config.json", b"[]", "config.json: expected the config of a transformers Deepseek"),
        ("config.json", b"{}", "config.json: expected the config of a transformers Deepseek"),
        ("model.safetensors", b"garbage", "model.safetensors: not a safetensors file: "),
    ],
)
def test_a_damaged_source_is_named(tmp_path, capsys, file, content, message):
    """The converter says which file cannot be read, and as what."""
    source = _source(tmp_path, TINY, lambda tensors: None)
    (source / file).write_bytes(content)

    assert main(["convert", str(source), str(tmp_path / "t")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_folder_of_other_names_is_told_in_a_line(tmp_path, capsys):
    """A checkpoint that is in the official layout already has hundreds of names to complain of."""
    folder = build.write(tmp_path, build.v41(), storage="bf16")

    assert main(["convert", str(folder), str(tmp_path / "t")]) == 2
    said = capsys.readouterr().err
    assert "expected transformers' names of tensors, got " in said
    assert said.endswith(" more\n")
    assert len(said) < 600


def test_inspect_lists_parts_types_and_what_is_unused(tmp_path, capsys):
    """Version, layer kinds, sizes that add up, and every unused tensor with its reason."""
    folder = build.write(tmp_path, build.v41(), storage="bf16")

    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "version   v4.1"
    assert lines[1] == "layers    10: 1 window, 3 ratio 2, 6 ratio 1"
    total = int(lines[3].split()[2].replace(",", ""))
    types = next(i for i, line in enumerate(lines) if line.startswith("types"))
    parts = [int(line.split()[-1].replace(",", "")) for line in lines[4:types]]
    assert sum(parts) == total == Checkpoint(folder).nbytes
    assert any(line.startswith("unused") and "DSpark" in line for line in lines)
    assert "  mtp.1.markov_head.head.weight" in lines


def test_inspect_needs_a_checkpoint(tmp_path, capsys):
    """A folder without config.json is misuse."""
    assert main(["inspect", str(tmp_path)]) == 2
    assert "config.json: file not found" in capsys.readouterr().err


def test_the_command_runs_as_a_module():
    """`python -m engine.cli --help` lists the commands and exits 0."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("verify", "inspect", "convert"):
        assert command in done.stdout


def test_an_official_folder_can_be_verified_with_taps(tmp_path, capsys):
    """naming official reads the folder itself, and outputs may be intermediate values."""
    folder = build.write(tmp_path, build.v4())
    ids = torch.arange(24).view(2, 12)
    values = run(load_model(folder), ids)
    wanted = ("logits", "layers.2.attn.y")
    save_file(
        {"ids": ids} | {n: values[n].contiguous() for n in wanted}, folder / "golden.safetensors"
    )
    spec = {
        "weights": "model.safetensors",
        "naming": "official",
        "config": "config.json",
        "golden": "golden.safetensors",
        "inputs": "ids",
        "outputs": dict.fromkeys(wanted, ""),
        "atol": 1e-5,
        "quantised": False,
        "architecture": "v4",
    }
    (folder / "verify.json").write_bytes(orjson.dumps(spec))

    assert main(["verify", str(folder)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(wanted)
