"""Compressors: twin against the reference's pooling plan, kernels against the twin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from engine.kernels import compress as c, reference as ops
from engine.kernels.records import unpack_torch
from engine.kernels.rope import rope_table
from tests.engine.kernels.batches import Span, make
from tests.engine.kernels.passes import DEVICE, poisoned

BLOCK, BLOCKS, SLOTS = 16, 24, 6
#: ratio, overlap, D, form
KINDS = {
    "csa": (4, True, 32, "fp8_64_tail"),
    "csa_index": (4, True, 16, "hadamard_fp4_32"),
    "hca": (16, False, 32, "none"),
    "ratio2": (2, False, 32, "fp4_e4m3_16"),
    "ratio1": (1, False, 32, "fp4_e4m3_16"),
}
SPANS = {
    "decode": [Span(0, 1), Span(3, 1), Span(15, 1), Span(6, 1), Span(31, 1)],
    "chunks": [Span(0, 21), Span(5, 1), Span(13, 20), Span(7, 9)],
}


@dataclass
class Case:
    """Inputs of one compressor call; pool and state hold NaN where nothing may be read."""

    kind: str
    spans: list[Span]
    dtype: torch.dtype = torch.float32
    block: int = BLOCK
    dim: int | None = None

    def __post_init__(self) -> None:
        self.ratio, self.overlap, dim, self.form = KINDS[self.kind]
        self.dim = dim = self.dim or dim
        self.rows, self.batch = make(self.spans, self.block, blocks=BLOCKS)
        g = torch.Generator().manual_seed(len(self.kind) + len(self.spans))
        width = dim * (2 if self.overlap else 1)
        columns = dim if self.ratio == 1 else 2 * width

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(DEVICE)

        wide = noise(self.rows.num_rows, columns + 3)  # a slice of a wider product
        self.proj = wide[:, 1 : columns + 1]
        v4 = self.kind.startswith(("csa", "hca"))
        self.ape = noise(self.ratio, width) if v4 else None
        self.norm = 1 + 0.2 * noise(dim)
        self.freqs = ops.rope_frequencies(8, 100.0).to(DEVICE)
        self.rope = rope_table(self.freqs, 64)
        self.state0 = None
        if self.ratio > 1:
            ring = self.ratio * (2 if self.overlap else 1)
            self.state0 = torch.full((SLOTS, ring, 2 * width), torch.nan, device=DEVICE)
            self.state0[0] = 0
            for i, span in enumerate(self.spans):
                for p in range(max(0, span.start - ring), span.start):
                    self.state0[i + 1, p % ring] = noise(2 * width)

    def pool(self, form: str) -> Tensor:
        """A pool of a form in which nothing is written."""
        shape = BLOCKS, self.block // self.ratio, self.dim
        return poisoned(*shape, dtype=self.dtype, form=form, tail=2 * self.rope.shape[2])

    def run(self, form: str, **how: object) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Latents, values in the pool, and state after compress_torch or compress_triton."""
        store_form = how.pop("store_form", self.form)
        pool = self.pool(store_form)
        state = None if self.state0 is None else self.state0.clone()
        latent = getattr(c, f"compress_{form}")(
            self.proj, self.ape, state, how.pop("rows", self.rows), ratio=self.ratio,
            overlap=self.overlap, norm_w=self.norm, eps=1e-6, rope=self.rope,
            form=store_form, pool=pool, dtype=self.dtype, **how,
        )  # fmt: skip
        tail = 2 * self.rope.shape[2]
        return latent, unpack_torch(pool, store_form, self.dim, tail, self.dtype), state


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Places, latents and entries by the reference's own plan and operations."""
    if case.ratio == 1:
        pooled, positions = case.proj, case.batch.positions
        places = case.batch.row_places(BLOCK)
    else:
        plan = case.batch.pooling(case.ratio, case.overlap, BLOCK)
        rows = case.proj
        if case.ape is not None:
            bias = torch.cat((torch.zeros_like(case.ape), case.ape), 1)
            rows = rows + bias[plan.phases]
        state = case.state0.clone()
        for i, span in enumerate(case.spans):  # positions before the sequence: as reset_slot
            ring, width = state.shape[1], state.shape[2] // 2
            for p in range(span.start - ring, 0):
                state[i + 1, p % ring, :width], state[i + 1, p % ring, width:] = 0, -torch.inf
        flat = state.view(-1, state.shape[-1])
        known = torch.cat((flat[plan.carried], rows))
        pooled = ops.pool_entries(known[plan.members], case.overlap)
        places, positions = plan.places, plan.positions
    latent = ops.rms_norm(pooled, case.norm, 1e-6)
    turns = ops.rope_turns(positions, case.freqs, torch.float32)
    return places, latent, ops.rope_(latent.clone(), turns)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("kind", KINDS)
def test_twin_is_the_references_pooling(kind, spans):
    """Entries, latents and what is written at all equal the reference's plan."""
    case = Case(kind, SPANS[spans])
    latent, pool, _ = case.run("torch", store_form="none", want_latent=True)
    places, expect_latent, expect = expected(case)
    flat = pool.view(-1, pool.shape[-1])
    torch.testing.assert_close(flat[places], expect, atol=2e-6, rtol=1e-5)
    untouched = torch.ones(len(flat), dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    untouched[: pool.shape[1]] = False
    assert flat[untouched].isnan().all()
    assert flat[: pool.shape[1]].isfinite().all()
    done = (case.rows.positions + 1) % case.ratio == 0
    torch.testing.assert_close(latent[done], expect_latent, atol=2e-6, rtol=1e-5)
    assert (latent[~done] == 0).all()


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "ratio1"])
def test_twin_keeps_the_last_rows(kind, spans):
    """The state holds the last rows of every sequence at their positions, other rows as before."""
    case = Case(kind, SPANS[spans])
    _, _, state = case.run("torch")
    plan = case.batch.pooling(case.ratio, case.overlap, BLOCK)
    rows = case.proj
    if case.ape is not None:
        rows = rows + torch.cat((torch.zeros_like(case.ape), case.ape), 1)[plan.phases]
    expect = case.state0.clone().view(-1, state.shape[-1])
    expect[plan.saved_at] = rows[plan.saved]
    torch.testing.assert_close(state[1:], expect.view_as(state)[1:], equal_nan=True, atol=0, rtol=0)


def assert_same_stored(found: Tensor, expect: Tensor, form: str, share: float) -> None:
    """Equal but for values at an edge between two codes, of which there may be a small share."""
    assert torch.equal(found.isnan(), expect.isnan())
    found, expect = found.nan_to_num().float(), expect.nan_to_num().float()
    if form == "none":
        torch.testing.assert_close(found, expect, atol=1e-5, rtol=1e-2 if share > 0.01 else 1e-5)
        return
    off = (found - expect).abs() > 1e-4 + 1e-4 * expect.abs()
    assert off.float().mean() <= share
    # An edge moves a value by one code, which is at most half of it, or of a group's smallest step.
    assert ((found - expect).abs() <= 0.51 * expect.abs() + 0.4).all()


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_the_twin(kind, spans):
    """Entries, latents and state of the kernel equal the twin's; nothing else is written."""
    case = Case(kind, SPANS[spans])
    want = kind.startswith("ratio")
    expect_latent, expect, expect_state = case.run("torch", want_latent=want)
    latent, pool, state = case.run("triton", want_latent=want)
    assert_same_stored(pool[1:], expect[1:], case.form, 0.002)
    assert pool[0].isfinite().all()
    if want:
        torch.testing.assert_close(latent, expect_latent, atol=2e-6, rtol=1e-5)
    if state is not None:
        torch.testing.assert_close(
            state[1:], expect_state[1:], equal_nan=True, atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("kind", ["csa", "ratio2"])
def test_kernel_rounds_to_bfloat16_where_the_twin_does(kind):
    """In bfloat16 almost all entries are equal, and none is off by more than one code."""
    case = Case(kind, SPANS["chunks"], dtype=torch.bfloat16)
    _, expect, _ = case.run("torch")
    _, pool, _ = case.run("triton")
    assert_same_stored(pool[1:], expect[1:], case.form, 0.02)


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_rows_that_were_refused_leave_no_state(form):
    """After a verify pass only accepted rows are kept, however many each sequence has."""
    case = Case("csa", [Span(9, 5), Span(2, 5), Span(6, 5)])
    accepted = torch.tensor([2, 5, 0], dtype=torch.int32, device=DEVICE)
    _, _, state = case.run(form, store=False)
    torch.testing.assert_close(state, case.state0, equal_nan=True, atol=0, rtol=0)
    store = getattr(c, f"store_state_{form}")
    store(case.proj, case.ape, state, case.rows, ratio=case.ratio, lengths=accepted)
    for g, count in enumerate(accepted.tolist()):
        alone = case.state0[g + 1].clone()
        for offset in range(count):
            row = case.proj[g * 5 + offset].clone()
            position = case.spans[g].start + offset
            row[row.shape[0] // 2 :] += case.ape[position % 4]
            alone[position % 8] = row
        torch.testing.assert_close(state[g + 1], alone, equal_nan=True, atol=1e-6, rtol=1e-6)


@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    kind=st.sampled_from(["csa", "hca", "ratio2"]),
)
def test_any_split_gives_the_same_entries(cuts, kind):
    """A sequence in one pass and the same rows in any chunks give equal entries and state."""
    total = sum(cuts)
    whole = Case(kind, [Span(0, total)])
    _, expect, expect_state = whole.run("torch", store_form="none")
    pool, state, done = whole.pool("none"), whole.state0.clone(), 0
    for cut in cuts:
        rows, _ = make([Span(done, cut)], BLOCK, blocks=BLOCKS)
        rows = replace(rows, tables=whole.rows.tables)
        c.compress_torch(
            whole.proj[done : done + cut], whole.ape, state, rows, ratio=whole.ratio,
            overlap=whole.overlap, norm_w=whole.norm, eps=1e-6, rope=whole.rope, form="none",
            pool=pool, dtype=torch.float32,
        )  # fmt: skip
        done += cut
    torch.testing.assert_close(pool[1:], expect[1:], equal_nan=True, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state[1:], expect_state[1:], equal_nan=True, atol=0, rtol=0)


def test_planted_faults_are_seen(monkeypatch):
    """A position bias of the wrong phase, a rotation off by one token, a wrong half: each shows."""
    case = Case("csa", SPANS["chunks"])
    _, expect, _ = case.run("torch", store_form="none")
    faults = {
        "phase": {"ape": case.ape.roll(1, 0)},
        "rotation": {"rope": case.rope.roll(-1, 0)},
        "halves": {"proj": case.proj.roll(32, 1)},
    }
    for name, changed in faults.items():
        for key, value in changed.items():
            monkeypatch.setattr(case, key, value)
        _, pool, _ = case.run("triton", store_form="none")
        monkeypatch.undo()
        assert (pool[1:] - expect[1:]).nan_to_num().abs().max() > 0.01, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "spans"),
    [(kind, "chunks") for kind in KINDS] + [("csa", "decode"), ("hca", "decode")],
)
def test_real_shapes(kind, spans, monkeypatch):
    """Kernels at the widths of V4-Flash, in bfloat16, equal the twin."""
    ratio, overlap, _, form = KINDS[kind]
    form = "fp8_64_tail" if kind == "hca" else form
    monkeypatch.setitem(KINDS, kind, (128 if kind == "hca" else ratio, overlap, 0, form))
    lists = {
        "decode": [Span(127, 1), Span(255, 1), Span(514, 1), Span(3, 1), Span(0, 1)],
        "chunks": [Span(0, 1027), Span(250, 700), Span(511, 1)],
    }
    case = Case(
        kind, lists[spans], dtype=torch.bfloat16, block=256, dim=128 if "index" in kind else 512
    )
    case.rope = rope_table(ops.rope_frequencies(64, 1e4).to(DEVICE), 2048)
    _, expect, expect_state = case.run("torch")
    _, pool, state = case.run("triton")
    assert_same_stored(pool[1:], expect[1:], case.form, 0.02)
    if state is not None:
        torch.testing.assert_close(
            state[1:], expect_state[1:], equal_nan=True, atol=1e-6, rtol=1e-6
        )
