"""Qwen3-MoE against goldens of transformers, whole, in chunks and token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from engine.config import ConfigError
from engine.device.qwen_pool import QwenPool
from engine.device.rows import build_rows
from engine.model.checkpoint import CheckpointError
from engine.model.qwen3 import Qwen3Model
from engine.model.qwen3_loading import load_qwen3
from engine.plan.step import Chunk
from engine.qwen3_config import Qwen3Config
from tests.engine.paging.checkpoints import write_qwen

GOLDEN = Path(__file__).parents[2] / "data" / "oracle" / "golden_qwen3"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


@pytest.fixture(scope="module", params=["torch", "triton"])
def model(request: pytest.FixtureRequest) -> Qwen3Model:
    return load_qwen3(GOLDEN, kernels=request.param, device=DEVICE, dtype=torch.float32)


def run(model: Qwen3Model, ids: list[int], splits: list[int]) -> torch.Tensor:
    """Logits after the last token of every piece."""
    pool = QwenPool(model.config, num_blocks=20, block_size=BLOCK, device=DEVICE)
    pool.poison(blocks=range(1, 20))
    blocks = (7, 3, 5, 1, 9, 2, 8, 4, 6, 10, 11)
    found, done = [], 0
    for size in splits:
        chunk = Chunk("r", 1, done, tuple(ids[done : done + size]), blocks, True)
        rows, wanted = build_rows([chunk], block_size=BLOCK, device=DEVICE)
        if size == 1:
            found.append(model.decode(rows, pool))
        else:
            *_, logits = model.prefill(rows, pool, wanted)
            found.append(logits)
        done += size
    return torch.cat(found).cpu()


@pytest.mark.parametrize("splits", [[64], [1] * 8, [20, 1, 1, 30, 1, 11]], ids=str)
def test_logits_equal_transformers(model: Qwen3Model, splits: list[int]) -> None:
    """Within 1e-4 in float32, however the sequence is cut."""
    golden = load_file(GOLDEN / "golden.safetensors")
    ids = golden["input_ids"].tolist()
    found = run(model, ids, splits)
    ends = torch.tensor(splits).cumsum(0) - 1
    assert (found - golden["logits"][ends]).abs().max() < 1e-4


@dataclass
class Begun:
    """Sequences whose prompts a pool holds, and the logits that each gives when decoded alone."""

    pool: QwenPool
    chunks: list[Chunk]
    alone: torch.Tensor


def decode(model: Qwen3Model, pool: QwenPool, chunks: list[Chunk]) -> torch.Tensor:
    rows, _ = build_rows(chunks, block_size=BLOCK, device=DEVICE)
    return model.decode(rows, pool)


@pytest.fixture(scope="module")
def begun(model: Qwen3Model) -> Begun:
    ids = load_file(GOLDEN / "golden.safetensors")["input_ids"].tolist()
    pool = QwenPool(model.config, num_blocks=20, block_size=BLOCK, device=DEVICE)
    pool.poison(blocks=range(1, 20))
    prompts, chunks = [], []
    for i, length in enumerate((5, 18, 2, 16, 9)):
        where = i + 1, (2 * i + 2, 2 * i + 1)
        text = tuple(ids[7 * i : 7 * i + length + 1])
        prompts.append(Chunk(str(i), where[0], 0, text[:-1], where[1], True))
        chunks.append(Chunk(str(i), where[0], length, text[-1:], where[1], True))
    rows, wanted = build_rows(prompts, block_size=BLOCK, device=DEVICE)
    list(model.prefill(rows, pool, wanted))
    return Begun(pool, chunks, torch.cat([decode(model, pool, [chunk]) for chunk in chunks]))


@pytest.mark.parametrize(
    "order", [[1, 0], [0, 2, 1], [3, 1, 0, 2], [2, 0, None, None], [4, 2, 0, 3, 1]], ids=str
)
def test_sequences_decoded_together_give_what_each_gives_alone(
    model: Qwen3Model, begun: Begun, order: list[int | None]
) -> None:
    """Of two to five sequences of different lengths in any order, and of two beside padding."""
    nobody = Chunk("", 0, 0, (0,), (0,), True)
    real = [i for i in order if i is not None]
    chunks = [nobody if i is None else begun.chunks[i] for i in order]
    found, wanted = decode(model, begun.pool, chunks)[: len(real)], begun.alone[real]
    assert (found - wanted).abs().max() < 1e-4
    assert (found - wanted.roll(1, 0)).abs().amax(1).min() > 0.1  # another sequence's are seen


def test_a_config_that_cannot_be_served_is_refused() -> None:
    """Every problem is named, with what was expected."""
    with pytest.raises(ConfigError) as caught:
        Qwen3Config.from_dict({"model_type": "qwen3_moe", "attention_bias": True})
    message = str(caught.value)
    assert "attention_bias: expected False, got True" in message
    assert "hidden_size" in message
    assert "rope_theta" in message


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Files that are absent, foreign, cut or incomplete are told in a line, by name."""
    folder = write_qwen(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    garbage = (b"", b"abc", b"x" * 100, (8).to_bytes(8, "little") + b"not json", whole[:-10])
    for content in garbage:
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load_qwen3(folder, kernels="torch", device="cpu")
        (problem,) = caught.value.problems
        assert problem.startswith("model.safetensors: not a safetensors file: ")
        assert str(caught.value) == f"{folder}: {problem}"
    tensors = {name: tensor for name, tensor in load(whole).items() if "experts" not in name}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing, expected \[.*; and 64 more$") as caught:
        load_qwen3(folder, kernels="torch", device="cpu")
    assert len(caught.value.problems) == 3 * 8 * 3
    file.unlink()
    with pytest.raises(CheckpointError, match=r"expected model\*\.safetensors, got no such file"):
        load_qwen3(folder, kernels="torch", device="cpu")
