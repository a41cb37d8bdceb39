"""Attention of blocks, whose rows see all of it and a whole window before: twin and kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention import attend_torch, attend_triton
from engine.kernels.records import pack_torch, unpack_torch
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from engine.plan.records import Form
from tests.engine.kernels.passes import DEVICE, Sequence, noise, poisoned, rows_of

HEADS, DIM, WINDOW, TAIL, EPS = 4, 32, 8, 16, 1e-6


def case(size: int, starts: tuple[int, ...], form: Form) -> tuple[tuple[object, ...], Rows]:
    rows = rows_of([Sequence(i + 1, s, size) for i, s in enumerate(starts)], block_size=16, num_blocks=40)  # fmt: skip
    ring = poisoned(1 + len(starts), WINDOW, DIM, dtype=torch.float32)
    for i, start in enumerate(starts):
        for p in range(max(0, start - WINDOW), start):
            ring[i + 1, p % WINDOW] = noise(DIM, seed=1000 * i + p)
    freqs = reference.rope_frequencies(TAIL, 1e4).to(DEVICE)
    q = 2 * noise(rows.num_rows, HEADS * DIM, seed=5)
    keys = pack_torch(noise(rows.num_rows, DIM, seed=6), form, TAIL)
    table = rope_table(freqs, rows.max_end + 1)
    return (q, keys, pack_torch(ring, form, TAIL), None, None, noise(HEADS, seed=7), table), rows


def keywords(size: int, form: Form) -> dict[str, object]:
    return {
        "ratio": 0,
        "head_norm_eps": EPS,
        "window": WINDOW,
        "scale": DIM**-0.5,
        "window_form": form,
        "block": size,
    }


def by_the_rules(args: tuple[object, ...], rows: Rows, size: int, form: Form) -> Tensor:
    """Row by row: the ring's positions before the block, then all of the block."""
    q, keys, ring, _, _, sink, _ = args
    keys, ring = (unpack_torch(t, form, DIM, TAIL, torch.float32).cpu() for t in (keys, ring))
    freqs = reference.rope_frequencies(TAIL, 1e4)
    found = []
    for t in range(rows.num_rows):
        i = t // size
        start = int(rows.starts[i])
        line = [torch.zeros(DIM)]
        line += [ring[i + 1, p % WINDOW] for p in range(max(0, start - WINDOW), start)]
        line += list(keys[i * size : (i + 1) * size])
        turn = reference.rope_turns(rows.positions[t : t + 1].long().cpu(), freqs, torch.float32)
        own = q[t].view(HEADS, DIM).cpu()
        own = own * torch.rsqrt(own.square().mean(-1, keepdim=True) + EPS)
        own = reference.rope_(own[None].clone(), turn) * DIM**-0.5
        mask = torch.zeros(1, 1, len(line))
        o = reference.sink_attention(own[None], torch.stack(line)[None], mask, sink.cpu())
        found.append(reference.rope_(o[0].clone(), turn.conj()).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("form", ["none", "fp8_32", "fp8_64_tail"])
@pytest.mark.parametrize("size", [2, 5])
def test_the_twin_follows_the_rules(size: int, form: Form) -> None:
    """Each row sees the whole block and no more than a window before it, in any fill of the ring."""
    args, rows = case(size, (0, 3, 8, 29), form)
    found = attend_torch(*args, rows, **keywords(size, form))
    assert (found.cpu() - by_the_rules(args, rows, size, form)).abs().max() < 1e-5
    causal = attend_torch(*args, rows, **keywords(0, form))
    assert (found - causal).abs().max() > 1e-2, "planted: rows that see what is before them alone"


@pytest.mark.parametrize("form", ["none", "fp8_32", "fp8_64_tail"])
@pytest.mark.parametrize("size", [2, 5])
def test_the_kernel_is_its_twin(size: int, form: Form) -> None:
    """The same outputs, with NaN in all memory that nobody may see."""
    args, rows = case(size, (0, 3, 8, 29), form)
    found = attend_triton(*args, rows, **keywords(size, form))
    wanted = attend_torch(*args, rows, **keywords(size, form))
    assert (found - wanted).abs().max() < 2e-5
