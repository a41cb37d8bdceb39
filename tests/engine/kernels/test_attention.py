"""Attention: torch against the eager reference, kernels against torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.kernels import attention, reference, unfold
from engine.kernels.attention import Tile, attend_torch, attend_triton, ready_queries_torch
from engine.kernels.records import pack_torch, unpack_torch
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from engine.kernels.window import store_window_torch
from engine.plan.records import Forms, forms_of
from tests.engine.kernels.passes import DEVICE, Sequence, noise, poisoned, rows_of

EPS, TAIL = 1e-6, 16
FREQS = reference.rope_frequencies(TAIL, 1e4)
PACKED = [forms_of(is_v41=v41, is_quantised=True) for v41 in (False, True)]


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
    forms: Forms | None = None,
    tail: int = TAIL,
) -> Case:
    """Random keys where a sequence has some, NaN elsewhere.

    kind: "window", "all" (every visible entry) or "choice". forms: of keys, plain if not given. tail:
    rotary dimensions.
    """
    forms = forms or Forms()
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
        pack_torch(noise(tokens, dim, dtype=dtype, seed=6), forms.window, tail),
        pack_torch(ring, forms.window, tail),
        None if entries is None else pack_torch(entries, forms.entries, tail),
        choice,
        noise(heads, seed=7),
        rope_table(reference.rope_frequencies(tail, 1e4).to(DEVICE), rows.max_end + 1),
        rows,
    )
    keywords = {
        "ratio": 0 if kind == "window" else ratio,
        "head_norm_eps": EPS if head_norm else None,
        "window": window,
        "scale": dim**-0.5,
        "window_form": forms.window,
        "entry_form": forms.entries,
    }
    return Case(args, keywords)


def as_values(c: Case) -> Case:
    """The same keys as plain numbers."""
    dim = c.args[0].shape[1] // len(c.args[5])
    args, k = list(c.args), c.keywords
    for place, form in ((1, k["window_form"]), (2, k["window_form"]), (3, k["entry_form"])):
        if args[place] is not None:
            args[place] = unpack_torch(args[place], form, dim, TAIL, c.args[0].dtype)
    return Case(tuple(args), k | {"window_form": "none", "entry_form": "none"})


def by_the_rules(c: Case) -> Tensor:
    """Row by row with the eager reference, keys gathered one by one."""
    q, k_rows, ring, entries, choice, sink, _, rows = c.args
    ratio, window = c.keywords["ratio"], c.keywords["window"]
    found = []
    turns = reference.rope_turns(rows.positions.long().cpu(), FREQS, torch.float32).to(DEVICE)
    for t in range(rows.num_rows):
        position, i = int(rows.positions[t]), int(rows.seq[t])
        start, slot = int(rows.starts[i]), int(rows.slots[i])
        floor = 0 if rows.floors is None else int(rows.floors[i])
        keys = [
            k_rows[int(rows.first[i]) + p - start] if p >= start else ring[slot, p % window]
            for p in range(max(floor, position - window + 1), position + 1)
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
    Sequence(3, 5, 3),
    Sequence(1, 0, 2),
    Sequence(0, 0, 1),
    Sequence(4, 30, 10),
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


@pytest.mark.parametrize("heads", [4, 7])
def test_parts_of_many_decode_rows_are_put_together(heads):
    """Heads that a program puts together, or a tile of them that is not whole, differ."""
    c = case([Sequence(1 + i, 3 * i, 1) for i in range(33)], kind="all", heads=heads)
    tile = Tile(heads=16, keys=16, splits=3, warps=4, ahead=0)
    got = attend_triton(*c.args, **c.keywords, tile=tile)
    torch.testing.assert_close(got, attend_torch(*c.args, **c.keywords), atol=2e-6, rtol=1e-5)


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


TILES = {
    "whole": Tile(16, 16, 1, 4, 1),
    "split": Tile(16, 16, 3, 4, 1),
    "warp groups": Tile(64, 16, 1, 8, 2),
    "warp groups split": Tile(64, 16, 2, 8, 2),
    "chosen": None,
}


def agree(got: Tensor, want: Tensor) -> bool:
    """Equal up to the rounding of weights and outputs in the dtype."""
    limit = 1e-5 if got.dtype == torch.float32 else 2e-2
    return torch.allclose(got.float(), want.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "tile"),
    [*(("decode", tile) for tile in TILES), ("prefill", "whole"), ("prefill", "warp groups split")],
)
def test_kernel_equals_torch(batch, kind, tile):
    """The kernel attends other keys than torch, or combines them otherwise."""
    c = case(DECODE if batch == "decode" else PREFILL, kind=kind)
    got = attend_triton(*c.args, **c.keywords, tile=TILES[tile])
    assert agree(got, attend_torch(*c.args, **c.keywords))


@pytest.mark.parametrize("tile", ["split", "warp groups"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_torch_in_bfloat16(kind, tile):
    """In bfloat16 the kernel is off by more than roundings."""
    c = case(DECODE, kind=kind, head_norm=False, heads=2, dtype=torch.bfloat16)
    got = attend_triton(*c.args, **c.keywords, tile=TILES[tile])
    assert agree(got, attend_torch(*c.args, **c.keywords))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forms", PACKED, ids=["v4", "v41"])
def test_records_are_attended_as_their_values(forms, kind, dtype):
    """Keys read from records give other outputs than the same values as plain numbers."""
    c = case(PREFILL, kind=kind, heads=2, forms=forms, dtype=dtype)
    plain = as_values(c)
    want = attend_torch(*plain.args, **plain.keywords)
    assert want.isfinite().all()
    assert torch.equal(attend_torch(*c.args, **c.keywords), want)


@pytest.mark.parametrize("tile", ["split", "warp groups"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forms", PACKED, ids=["v4", "v41"])
def test_kernel_reads_records(forms, kind, tile):
    """The kernel takes keys from elsewhere in a record, or records for others."""
    c = case(DECODE, kind=kind, heads=2, forms=forms, dtype=torch.bfloat16)
    got = attend_triton(*c.args, **c.keywords, tile=TILES[tile])
    assert agree(got, attend_torch(*c.args, **c.keywords))
    plain = as_values(c)
    same = attend_triton(*plain.args, **plain.keywords, tile=TILES[tile])
    # Entries of another form begin with a tile of their own: sums come in another order.
    assert torch.equal(got, same) or (kind != "window" and forms.window != forms.entries)


@pytest.mark.parametrize("forms", [Forms(), PACKED[0]], ids=["plain", "v4"])
def test_choices_may_be_shorter_than_what_is_visible(forms):
    """Parts of the keys in which none is chosen add something, or take all."""
    sequences = [Sequence(2, 240, 1), Sequence(1, 199, 1)]
    c = case(sequences, kind="choice", heads=2, topk=40, forms=forms)
    c = changed(c, 4, c.args[4].index_fill(1, torch.arange(1, 40, device=DEVICE), -1))
    want = attend_torch(*c.args, **c.keywords)
    assert want.isfinite().all()
    assert agree(attend_triton(*c.args, **c.keywords, tile=TILES["split"]), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forms", PACKED, ids=["v4", "v41"])
def test_long_passes_unpack_keys_first(forms, kind, monkeypatch):
    """A pass of many rows attends other keys, or other rows of theirs, than it was given."""
    monkeypatch.setattr(unfold, "MOST_ROWS_PACKED", 0)
    c = case(PREFILL, kind=kind, heads=2, forms=forms, dtype=torch.bfloat16)
    # Two sequences begin with one block, of which the shorter sees a part.
    tables = c.rows.tables.clone()
    before, tables[0, 0] = int(tables[0, 0]), tables[3, 0]
    c = changed(c, 7, replace(c.rows, tables=tables))
    if kind == "choice":
        moved = c.args[4] + (tables[0, 0] - before) * c.args[3].shape[1]
        c = changed(c, 4, torch.where(c.args[4] // c.args[3].shape[1] == before, moved, c.args[4]))
    got = attend_triton(*c.args, **c.keywords, tile=TILES["whole"])
    plain = as_values(c)
    assert torch.equal(got, attend_triton(*plain.args, **plain.keywords, tile=TILES["whole"]))


def test_too_many_entries_are_not_unpacked_first(monkeypatch):
    """Memory for plain keys grows with the pool, or short passes take it."""
    c = case(PREFILL, kind="all", heads=2, forms=PACKED[0])
    entries = c.args[3]
    monkeypatch.setattr(unfold, "MOST_ROWS_PACKED", c.rows.num_rows - 1)
    monkeypatch.setattr(unfold, "MOST_ENTRIES", 5 * 3 * 4)  # 5 sequences of 3 blocks of 4
    assert unfold.is_worth_it(c.rows, entries)
    assert not unfold.is_worth_it(
        replace(c.rows, max_end=49, tables=c.rows.tables.repeat(1, 2)), entries
    )
    monkeypatch.setattr(unfold, "MOST_ROWS_PACKED", c.rows.num_rows)
    assert not unfold.is_worth_it(c.rows, entries)


@pytest.mark.parametrize("fault", FAULTS)
def test_kernel_is_seen_to_be_faulty(fault):
    """The comparison with torch would not see this fault."""
    c = case(DECODE, kind="choice")
    wrong = FAULTS[fault](c)
    got = attend_triton(*wrong.args, **wrong.keywords)
    assert not agree(got, attend_torch(*c.args, **c.keywords))


def test_mismatched_pools_are_refused():
    """A ring of another width, or entries of another dtype or form, are read as if they fitted."""
    c = case(DECODE, kind="all")
    with pytest.raises(ValueError, match="window: expected the width of the ring, 8, got 4"):
        attend_triton(*c.args, **c.keywords | {"window": 4})
    narrow = changed(c, 3, c.args[3].bfloat16())
    with pytest.raises(ValueError, match="entries: expected the ring's"):
        attend_triton(*narrow.args, **narrow.keywords)
    stored = case(DECODE, kind="all", forms=PACKED[1])
    with pytest.raises(ValueError, match=r"pool: expected torch.uint8 rows of 48 for fp8_32"):
        attend_triton(*stored.args, **stored.keywords | {"entry_form": "fp8_32"})


@pytest.mark.parametrize("kind", ["window", "choice"])
@pytest.mark.parametrize("sequences", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_windows_end_at_the_floor(sequences, kind):
    """A window reaches below its sequence's floor, where a ring holds what is nobody's."""
    c = case(sequences, kind=kind, heads=2)
    starts = c.rows.starts.tolist()
    floors = [max(0, start - back) for start, back in zip(starts, (2, 0, 0, 3, 1), strict=True)]
    for i, (start, floor) in enumerate(zip(starts, floors, strict=True)):
        for p in range(max(0, start - 8), floor):
            c.args[2][c.rows.slots[i], p % 8] = float("nan")
    low = torch.tensor(floors, dtype=torch.int32, device=DEVICE)
    floored = changed(c, 7, replace(c.rows, floors=low))
    want = by_the_rules(floored)
    assert want.isfinite().all()
    assert torch.allclose(attend_torch(*floored.args, **c.keywords), want, atol=2e-6)
    assert agree(attend_triton(*floored.args, **c.keywords), want)
    assert attend_torch(*c.args, **c.keywords).isnan().any()


def test_many_rows_take_several_launches(monkeypatch):
    """Rows beyond the first launch find their keys or outputs elsewhere."""
    c = case(PREFILL, kind="choice", heads=2)
    monkeypatch.setattr(attention, "_LAUNCH", 7)
    got = attend_triton(*c.args, **c.keywords, tile=TILES["split"])
    assert agree(got, attend_torch(*c.args, **c.keywords))


def test_pools_at_odd_places_are_refused():
    """Keys are read 16 bytes at a time from where no 16 bytes begin."""
    c = case(DECODE, kind="window")
    k_rows = c.args[1]
    odd = torch.zeros(k_rows.numel() + 1, device=DEVICE)[1:].view_as(k_rows).copy_(k_rows)
    with pytest.raises(ValueError, match="a multiple of 32 bytes apart"):
        attend_triton(*changed(c, 1, odd).args, **c.keywords)


@given(data=st.data())
@settings(max_examples=15)
def test_any_division_into_passes_gives_the_same(data):
    """A token's attention depends on how the tokens before it were cut into passes."""
    length = data.draw(st.integers(1, 30))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
    k, q = noise(length, 32, seed=1), noise(length, 4 * 32, seed=2)
    sink, rope = noise(4, seed=3), rope_table(FREQS.to(DEVICE), 64)
    keywords = {"ratio": 0, "head_norm_eps": None, "window": 8, "scale": 0.2}
    found = []
    ring = poisoned(2, 8, 32, dtype=torch.float32)
    for first, last in pairwise(cuts):
        rows = rows_of([Sequence(1, first, last - first)], block_size=64, num_blocks=2)
        part = q[first:last], k[first:last], ring, None, None, sink, rope, rows
        found.append(attend_torch(*part, **keywords))
        store_window_torch(k[first:last], rows, ring)
    rows = rows_of([Sequence(1, 0, length)], block_size=64, num_blocks=2)
    ring = poisoned(2, 8, 32, dtype=torch.float32)
    whole = attend_torch(q, k, ring, None, None, sink, rope, rows, **keywords)
    assert torch.allclose(torch.cat(found), whole, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "forms"),
    [(17, Forms()), *((n, PACKED[0]) for n in (1, 6, 16, 64)), *((n, PACKED[1]) for n in (1, 64))],
    ids=["17-plain", "1-v4", "6-v4", "16-v4", "64-v4", "1-v41", "64-v41"],
)
def test_real_widths_decode(tokens, kind, forms):
    """At real widths and batches the kernel differs from torch."""
    starts = [Sequence(1 + i, (997 * i) % 3000, 1) for i in range(tokens)]
    same_at_real_widths(starts, kind, forms, head_norm=tokens != 17)


@pytest.mark.gpu
@pytest.mark.parametrize("forms", [Forms(), *PACKED], ids=["plain", "v4", "v41"])
@pytest.mark.parametrize("kind", KINDS)
def test_real_widths_prefill(kind, forms):
    """At real widths a mixed pass, with floors, differs from torch."""
    sequences = [Sequence(1, 0, 300), Sequence(2, 777, 200), Sequence(3, 1500, 1)]
    same_at_real_widths(sequences, kind, forms, head_norm=True, floors=[0, 700, 1450])


@pytest.mark.gpu
@pytest.mark.parametrize("forms", PACKED, ids=["v4", "v41"])
@pytest.mark.parametrize("kind", KINDS)
def test_real_widths_of_long_passes(kind, forms, monkeypatch):
    """At real widths a pass that unpacks its keys first differs from torch."""
    monkeypatch.setattr(unfold, "MOST_ROWS_PACKED", 0)
    sequences = [Sequence(1, 0, 300), Sequence(2, 777, 200), Sequence(3, 1500, 1)]
    same_at_real_widths(sequences, kind, forms, head_norm=True)


def same_at_real_widths(
    sequences: list[Sequence],
    kind: str,
    forms: Forms,
    *,
    head_norm: bool,
    floors: list[int] | None = None,
) -> None:
    """Compare in bfloat16, 64 heads of 512, window 128, at most 512 entries of 4 or 128 tokens."""
    c = case(
        sequences,
        kind=kind,
        heads=64,
        dim=512,
        window=128,
        ratio=128 if kind == "all" else 4,
        topk=512,
        head_norm=head_norm,
        block_size=256,
        dtype=torch.bfloat16,
        forms=forms,
        tail=64,
    )
    if floors is not None:
        low = torch.tensor(floors, dtype=torch.int32, device=DEVICE)
        c = changed(c, 7, replace(c.rows, floors=low))
    want = attend_torch(*c.args, **c.keywords)
    assert agree(attend_triton(*c.args, **c.keywords), want)
    if floors is None:  # as a decode step gives them
        q = ready_queries_torch(c.args[0], 64, c.keywords["head_norm_eps"], c.args[6], c.rows)
        assert agree(attend_triton(q, *c.args[1:], **c.keywords, ready=True), want)
