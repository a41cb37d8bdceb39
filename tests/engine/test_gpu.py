"""The reference engine on a GPU against the same engine on the CPU, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import TINY_CHECKPOINT
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.core import load_engine
from engine.options import EngineConfig
from tests.engine.model import build

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
SIZES = (1, 2, 7, 40, 129, 300)
NEW = 24


def run(path: Path, device: str, vocab: int) -> dict[str, list[TokenDelta]]:
    """Greedy deltas with logprobs of several prompts at once, by request."""
    options = EngineConfig(device=device, dtype="float32", max_batched_tokens=64)  # type: ignore[arg-type]
    core = load_engine(path, options)
    g = torch.Generator().manual_seed(5)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, top_logprobs=3, ignore_eos=True)
    for n in SIZES:
        prompt = tuple(torch.randint(0, vocab, (n,), generator=g).tolist())
        core.submit(GenerateRequest(str(n), prompt, params))
    found: dict[str, list[TokenDelta]] = {}
    while core.has_work:
        for delta in core.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


@pytest.mark.parametrize("name", ["v4", "v41", "tiny"])
def test_gpu_and_cpu_agree(name: str, tmp_path: Path) -> None:
    """Same greedy tokens and the same logprobs, up to the first tie within rounding."""
    path, vocab = TINY_CHECKPOINT, 2048
    if name != "tiny":
        config = build.v4() if name == "v4" else build.v41()
        path, vocab = tmp_path, config.get("text_config", config)["vocab_size"]
        build.write(path, config)
    cpu, gpu = run(path, "cpu", vocab), run(path, "cuda", vocab)

    assert set(cpu) == set(gpu) == {str(n) for n in SIZES}
    compared = 0
    for key, deltas in cpu.items():
        for a, b in zip(deltas, gpu[key], strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            top = a.logprobs[0].top
            if a.token_ids != b.token_ids:
                assert abs(top[0][1] - top[1][1]) < 1e-3, "not a tie"
                break
            compared += 1
            assert abs(a.logprobs[0].logprob - b.logprobs[0].logprob) < 2e-3
    assert compared > 0.5 * NEW * len(SIZES)
