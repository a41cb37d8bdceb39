"""Attention: torch against the eager reference, kernels against torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention import attend_torch
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from tests.engine.kernels.passes import DEVICE, Sequence, noise, poisoned, rows_of

EPS = 1e-6
FREQS = reference.rope_frequencies(16, 1e4)


@dataclass
class Case:
    """One layer's attention: what attend takes, by position, and its keywords."""

    args: tuple[Tensor | Rows | None, ...]
    keywords: dict[str, object]

    @property
    def rows(self) -> Rows:
        """The pass."""
        rows = self.args[-1]
        assert isinstance(rows, Rows)
        return rows


def case(
    sequences: list[Sequence],
    *,
    kind: str,
    heads: int = 4,
    dim: int = 32,
    window: int = 8,
    ratio: int = 4,
    topk: int = 5,
    head_norm: bool = True,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random keys where a sequence has some, NaN elsewhere.

    kind: "window", "all" (every visible entry) or "choice".
    """
    num_blocks = 2 + sum(-(-(s.start + s.length) // block_size) for s in sequences)
    rows = rows_of(sequences, block_size=block_size, num_blocks=num_blocks)
    tokens = rows.num_rows
    ring = poisoned(1 + max(s.slot for s in sequences), window, dim, dtype=dtype)
    for i, s in enumerate(sequences):
        for p in range(max(0, s.start - window), s.start):
            ring[s.slot, p % window] = noise(dim, dtype=dtype, seed=1000 * i + p)
    entries = choice = None
    if kind != "window":
        per_block = block_size // ratio
        entries = poisoned(num_blocks, per_block, dim, dtype=dtype)
        for i, s in enumerate(sequences):
            for j in range((s.start + s.length) // ratio):
                at = rows.tables[i, j // per_block].item(), j % per_block
                entries[at] = noise(dim, dtype=dtype, seed=77000 * (i + 1) + j)
    if kind == "choice":
        g = torch.Generator().manual_seed(3)
        choice = torch.full((tokens, topk), -1, dtype=torch.int32)
        for t in range(tokens):
            i = int(rows.seq[t])
            visible = (int(rows.positions[t]) + 1) // ratio
            # sometimes fewer than there are, as where candidates are restricted
            count = min(topk, visible) - (t % 3 == 2 and visible > 1)
            for n, j in enumerate(
                torch.randperm(visible, generator=g)[:count].sort().values.tolist()
            ):
                choice[t, n] = rows.tables[i, j // per_block] * per_block + j % per_block
        choice = choice.to(DEVICE)
    args = (
        2 * noise(tokens, heads * dim, dtype=dtype, seed=5),
        noise(tokens, dim, dtype=dtype, seed=6),
        ring,
        entries,
        choice,
        noise(heads, seed=7),
        rope_table(FREQS.to(DEVICE), rows.max_end + 1),
        rows,
    )
    keywords = {
        "ratio": 0 if kind == "window" else ratio,
        "head_norm_eps": EPS if head_norm else None,
        "window": window,
        "scale": dim**-0.5,
    }
    return Case(args, keywords)


def by_the_rules(c: Case) -> Tensor:
    """Row by row with the eager reference, keys gathered one by one."""
    q, k_rows, ring, entries, choice, sink, _, rows = c.args
    ratio, window = c.keywords["ratio"], c.keywords["window"]
    found = []
    turns = reference.rope_turns(rows.positions.long().cpu(), FREQS, torch.float32).to(DEVICE)
    for t in range(rows.num_rows):
        position, i = int(rows.positions[t]), int(rows.seq[t])
        start, slot = int(rows.starts[i]), int(rows.slots[i])
        keys = [
            k_rows[int(rows.first[i]) + p - start] if p >= start else ring[slot, p % window]
            for p in range(max(0, position - window + 1), position + 1)
        ]
        if entries is not None and choice is not None:
            flat = entries.flatten(0, 1)
            keys += [flat[place] for place in choice[t].tolist() if place >= 0]
        elif entries is not None:
            n = entries.shape[1]
            for j in range((position + 1) // ratio):
                keys.append(entries[int(rows.tables[i, j // n]), j % n])
        x = q[t].view(1, len(sink), -1)
        if c.keywords["head_norm_eps"] is not None:
            x = reference.rms_norm(x, None, c.keywords["head_norm_eps"])
        x = reference.rope_(x.clone(), turns[t : t + 1]) * c.keywords["scale"]
        padded = torch.stack([torch.zeros_like(keys[0]), *keys])[None]
        mask = torch.zeros(1, 1, padded.shape[1], device=DEVICE)
        o = reference.sink_attention(x[None], padded, mask, sink)[0]
        found.append(reference.rope_(o.clone(), turns[t : t + 1].conj()).flatten())
    return torch.stack(found)


#: Chunks inside and beyond a ring, with and without entries, a long one, decode rows, padding.
PREFILL = [
    Sequence(3, 5, 7),
    Sequence(1, 0, 3),
    Sequence(0, 0, 1),
    Sequence(4, 30, 21),
    Sequence(2, 9, 1),
]
DECODE = [
    Sequence(2, 40, 1),
    Sequence(5, 0, 1),
    Sequence(0, 0, 1),
    Sequence(1, 7, 1),
    Sequence(3, 2, 1),
]
KINDS = ["window", "all", "choice"]


@pytest.mark.parametrize("head_norm", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_torch_equals_the_reference(sequences, kind, head_norm):
    """A row attends other keys than the rules give it, or combines them otherwise."""
    c = case(sequences, kind=kind, head_norm=head_norm)
    got = attend_torch(*c.args, **c.keywords)
    assert torch.allclose(got, by_the_rules(c), atol=2e-6)


def shifted(c: Case, **changes: int) -> Case:
    """The case with integers of its rows moved."""
    moved = {name: getattr(c.rows, name) + by for name, by in changes.items()}
    return Case((*c.args[:-1], replace(c.rows, **moved)), c.keywords)


def changed(c: Case, place: int, value: Tensor) -> Case:
    """The case with another argument."""
    return Case((*c.args[:place], value, *c.args[place + 1 :]), c.keywords)


FAULTS = {
    "no sink": lambda c: changed(c, 5, torch.full_like(c.args[5], -1e9)),
    "another head norm": lambda c: Case(c.args, c.keywords | {"head_norm_eps": 0.5}),
    "another scale": lambda c: Case(c.args, c.keywords | {"scale": 0.2}),
    "a key of the pass": lambda c: changed(c, 1, c.args[1] * 1.01),
    "a choice short of one": lambda c: changed(c, 4, c.args[4].masked_fill(c.args[4] == c.args[4][:, :1], -1)),
    "no turning": lambda c: changed(c, 6, c.args[6] * 0 + torch.tensor([[1.0], [0.0]], device=DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault):
    """The comparison with the reference would not see this fault."""
    c = case(PREFILL, kind="choice")
    got = attend_torch(*FAULTS[fault](c).args, **FAULTS[fault](c).keywords)
    assert not torch.allclose(got, by_the_rules(c), atol=1e-3)
