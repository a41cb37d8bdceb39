"""`bathyal engine inspect` of Qwen's checkpoints: parts, types, and what is wrong with a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.cli import main
from tests.engine.paging.checkpoints import STORED, write_qwen


@pytest.mark.parametrize("kind", STORED)
def test_parts_and_types_are_listed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes add up to the file's tensors, in every stored form."""
    folder = write_qwen(tmp_path, kind)
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    tensors = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert lines[:4] == [
        "version   Qwen3-MoE",
        f"layers    3: 8 experts each, {kind}, 2 for a token",
        "context   256 tokens",
        f"tensors   {len(tensors)}, {total:,} bytes",
    ]
    parts = {line[2:22].strip(): int(line[22:].replace(",", "")) for line in lines[4:-1]}
    assert set(parts) == {"routed experts", "attention", "embedding and head", "routers", "norms"}
    assert sum(parts.values()) == total
    assert parts["routers"] == 3 * 8 * 64 * 4
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        stored = {opened.get_slice(name).get_dtype() for name in tensors}
    assert {word.split()[1] for word in lines[-1].removeprefix("types").split(",")} == stored


def test_what_is_wrong_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every missing, misshapen and unknown tensor, with exit code 1."""
    folder = write_qwen(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.other"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    assert main(["inspect", str(folder)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert sorted(told) == [
        "problem   lm_head.weight: expected [320, 64], got [319, 64]",
        "problem   model.norm.weight: missing, expected [64]",
        "problem   model.other: unknown, [64]",
    ]


def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged file, and none at all, are misuse told in a line."""
    file = write_qwen(tmp_path) / "model.safetensors"
    file.write_bytes(b"hello")
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"{file}: expected a safetensors file: " in capsys.readouterr().err
    file.unlink()
    assert main(["inspect", str(tmp_path)]) == 2
    assert "expected model*.safetensors, got no such file" in capsys.readouterr().err
