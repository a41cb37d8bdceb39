"""The checkpoint that ships, in the engine that serves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from safetensors import safe_open

from engine import TINY_CHECKPOINT
from engine.model.checkpoint import load_model
from engine.model.engram import fold_table
from tests.engine.model import drive
from training.evaluate import demo_cases, engine_generate, evaluate
from training.export import unstack
from training.model import TrainModel

DATA = Path(__file__).parents[1] / "data"


def teacher_ids(count: int) -> list[int]:
    """The first tokens of the fixed teacher-forced set."""
    ids: list[int] = np.load(DATA / "tiny_teacher.npz")["ids"][:count].astype(np.int64).tolist()
    return ids


def changed(path: Path, **fields: object) -> Path:
    """A copy of the checkpoint whose config says otherwise."""
    path.mkdir()
    for file in ("model.safetensors", "tokenizer.json"):
        (path / file).symlink_to(TINY_CHECKPOINT / file)
    config = orjson.loads((TINY_CHECKPOINT / "config.json").read_bytes())
    config["text_config"] |= fields
    (path / "config.json").write_bytes(orjson.dumps(config))
    return path


def test_teacher_forced_accuracy() -> None:
    """The engine runs the shipped weights as they were trained: 99 % of tokens right (issue 2)."""
    data = np.load(DATA / "tiny_teacher.npz")
    model = load_model(TINY_CHECKPOINT)
    right = total = at = 0
    for length in data["lengths"]:
        ids = data["ids"][at : at + length].astype(np.int64)
        mask = data["mask"][at : at + length]
        at += length
        best = drive.run(model, ids.tolist()).argmax(-1).numpy()
        right += int((best[:-1] == ids[1:])[mask[1:]].sum())
        total += int(mask[1:].sum())

    assert total > 5000
    assert right / total >= 0.99


CONSTANTS: dict[str, object] = {
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-3,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 3,
    "sliding_window": 64,
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-3,
    "rope_theta": 1000.0,
    "compress_rope_theta": 10000.0,
    "engram_compressed_vocab_size": 1900,
    "index_topk": 64,
}


@pytest.fixture(scope="module")
def as_shipped() -> torch.Tensor:
    return drive.run(load_model(TINY_CHECKPOINT), teacher_ids(300))


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_config_are_honoured(
    name: str, as_shipped: torch.Tensor, tmp_path: Path
) -> None:
    """A constant that differs from the one the weights were trained with changes the logits."""
    other = load_model(changed(tmp_path / "other", **{name: CONSTANTS[name]}))

    assert (drive.run(other, teacher_ids(300)) - as_shipped).abs().max() > 1e-2


def test_training_model_and_engine_are_one_model() -> None:
    """The shipped weights give the same logits in the model that was trained and in the engine."""
    config = orjson.loads((TINY_CHECKPOINT / "config.json").read_bytes())
    text = config["text_config"]
    fold = fold_table(
        TINY_CHECKPOINT / "tokenizer.json", text["vocab_size"], text["engram_compressed_vocab_size"]
    )
    twin = TrainModel(config, fold, "cpu", torch.float32, seed=0)
    with safe_open(TINY_CHECKPOINT / "model.safetensors", "pt") as file, torch.no_grad():
        for name, value in twin.p.items():
            stem, _, leaf = name.rpartition(".")
            if stem.endswith("ffn.experts"):
                parts = [file.get_tensor(f"{stem}.{e}.{leaf}.weight") for e in range(len(value))]
                value.copy_(torch.stack(parts))
            else:
                value.copy_(file.get_tensor(name))
    ids = teacher_ids(400)

    want = twin.logits(torch.tensor([ids]))[0]
    got = drive.run(load_model(TINY_CHECKPOINT), ids)

    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


def test_unstacking_keeps_every_expert() -> None:
    """Export names each expert's matrices and stores table rows as their e4m3 values."""
    w1 = torch.arange(24.0).view(2, 3, 4)
    rows = torch.full((1, 32), 0.3)

    out = unstack({"layers.0.ffn.experts.w1": w1, "layers.1.engram.embed.weight": rows})

    assert torch.equal(w1[1], out["layers.0.ffn.experts.1.w1.weight"])
    assert out["layers.1.engram.embed.weight"][0, 0] == 0.3125  # the nearest e4m3 value
    assert len(out) == 3


def test_demo_questions_all_work() -> None:
    """The README's questions and twenty-four a newcomer would try, thinking on and off."""
    report = evaluate(engine_generate(TINY_CHECKPOINT), demo_cases())

    wrong = [
        (f["meant"], f["got"].get("tool_calls"), f["got"].get("content")) for f in report.failures
    ]
    assert wrong == []
    assert len(demo_cases()) == 60
