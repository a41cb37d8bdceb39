"""Window keys, compressors and index queries in one launch: bit for bit what each does alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import inputs
from engine.kernels.attention import attend_triton
from engine.kernels.inputs import CompressorInput, HeadInput, QueryInput, WindowInput
from engine.kernels.records import unpack_torch
from engine.kernels.reference import rope_frequencies
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from tests.engine.kernels.batches import Span, make
from tests.engine.kernels.passes import DEVICE, noise, poisoned

BLOCK, BLOCKS, SLOTS, WINDOW, TAIL, HEADS = 16, 24, 6, 8, 16, 6
#: ratio, overlap, forms of compressors, with index queries, with latents
KINDS = {
    "window": (0, False, (), False, False),
    "csa": (4, True, ("fp8_64_tail", "hadamard_fp4_32"), True, False),
    "hca": (16, False, ("fp8_64_tail",), False, False),
    "ratio2": (2, False, ("fp4_e4m3_16",), True, True),
    "ratio1": (1, False, ("fp4_e4m3_16",), True, True),
    "reader": (1, False, (), True, False),
}
#: Place of what is ready for attention among the results.
READY = 3
DECODE = [Span(3, 1), Span(15, 1), Span(0, 1), Span(6, 1)]
CHUNKS = [Span(0, 5), Span(6, 3)]


class Layer:
    """Fresh inputs of one kind of layer; equal for equal seeds."""

    def __init__(self, kind: str, rows: Rows, *, dim: int = 64, index: int = 32) -> None:
        self.ratio, self.overlap, forms, chooses, self.want_latent = KINDS[kind]
        count = rows.num_rows
        kv = noise(count, dim + 8, seed=1)[:, 8:]
        v41 = kind.startswith(("ratio", "reader"))
        window_form = "fp8_32" if v41 else "fp8_64_tail"
        self.ring = poisoned(SLOTS, WINDOW, dim, dtype=torch.float32, form=window_form, tail=TAIL)
        self.dims = [dim, index]
        self.window = WindowInput(kv, 1 + noise(dim, seed=2) / 9, self.ring, window_form)
        self.compressors = []
        for i, form in enumerate(forms):
            width = (index if i else dim) * (2 if self.overlap else 1)
            columns = width if self.ratio == 1 else 2 * width
            ring = self.ratio * (2 if self.overlap else 1)
            entries = BLOCK // self.ratio
            self.compressors.append(
                CompressorInput(
                    noise(count, columns, seed=3 + i),
                    None if v41 else noise(self.ratio, width, seed=5 + i),
                    noise(SLOTS, ring, 2 * width, seed=7 + i) if self.ratio > 1 else None,
                    1 + noise(index if i else dim, seed=9 + i) / 9,
                    form,
                    poisoned(
                        BLOCKS, entries, self.dims[i], dtype=torch.float32, form=form, tail=TAIL
                    ),
                )
            )
        form = "fp4_32" if v41 else "hadamard_fp4_32"
        raw = noise(count, 2 * index, seed=11)
        self.queries = QueryInput(raw, index, form) if chooses else None
        self.heads = HeadInput(noise(count, HEADS * dim, seed=13), HEADS, None if v41 else 1e-6)

    def run(self, call: object, rows: Rows, store: bool) -> list[Tensor | None]:
        """Everything that the call gives or writes, records as values."""
        table = rope_table(rope_frequencies(TAIL, 100.0).to(DEVICE), 256)
        given = call(
            self.window, self.compressors, self.queries, self.heads, table, rows,
            ratio=self.ratio, overlap=self.overlap, eps=1e-6, want_latent=self.want_latent,
            store=store,
        )  # fmt: skip
        form, dim = self.window.form, self.dims[0]
        keys, ring = (
            unpack_torch(t, form, dim, TAIL, torch.float32) for t in (given[0], self.ring)
        )
        written: list[Tensor | None] = []
        for c, width in zip(self.compressors, self.dims, strict=False):
            written += [unpack_torch(c.pool, c.form, width, TAIL, torch.float32), c.state]
        return [keys, *given[1:], ring, *written]


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_together_is_apart(kind, store):
    """One launch gives and writes what a launch for each part does, bit for bit.

    But for the queries of attention, which apart it readies itself.
    """
    rows, _ = make(DECODE, BLOCK, blocks=BLOCKS)
    apart = Layer(kind, rows).run(inputs._apart, rows, store)
    together = Layer(kind, rows).run(inputs.attention_inputs_triton, rows, store)
    for i, (found, want) in enumerate(zip(together, apart, strict=True)):
        assert (found is None) == (want is None) or i == READY
        if want is not None:
            torch.testing.assert_close(found, want, equal_nan=True, atol=0, rtol=0, msg=str(i))


@pytest.mark.parametrize(("kind", "spans"), [(k, DECODE) for k in KINDS] + [("csa", CHUNKS)])
def test_kernel_is_the_twin(kind, spans):
    """What is given and written equals the torch form, but for values at an edge between codes."""
    rows, _ = make(spans, BLOCK, blocks=BLOCKS)
    want = Layer(kind, rows).run(inputs.attention_inputs_torch, rows, True)
    found = Layer(kind, rows).run(inputs.attention_inputs_triton, rows, True)
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            a, b = a.nan_to_num(), b.nan_to_num()
            if a.dim() == 3:  # slot and block 0 are nobody's
                a, b = a[1:], b[1:]
            assert ((a - b).abs() > 1e-4).float().mean() < 0.004


def test_idle_rows_ask_nothing(monkeypatch):
    """Index queries of rows that see no more than `idle` entries are made, or others are not."""
    rows, _ = make(DECODE, BLOCK, blocks=BLOCKS)
    whole, some = Layer("csa", rows), Layer("csa", rows)
    raw = noise(rows.num_rows, 16 * 32, seed=12)  # as many heads as a program takes
    whole.queries = replace(whole.queries, raw=raw)
    some.queries = replace(whole.queries, idle=1)
    want = whole.run(inputs.attention_inputs_triton, rows, True)[2]
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(77))
    made = some.run(inputs.attention_inputs_triton, rows, True)[2]
    asks = (rows.positions + 1) // 4 > 1
    assert asks.any()
    assert torch.equal(made[asks], want[asks])
    assert (made[~asks] == 77).all()


def test_planted_fault_is_seen():
    """A launch that leaves out the second compressor writes none of its keys."""
    rows, _ = make(DECODE, BLOCK, blocks=BLOCKS)
    want, short = Layer("csa", rows), Layer("csa", rows)
    want.run(inputs._apart, rows, True)
    keys = short.compressors.pop()
    short.run(inputs.attention_inputs_triton, rows, True)
    assert not torch.equal(keys.pool, want.compressors[1].pool)


@pytest.mark.parametrize("kind", ["window", "ratio1"])
def test_ready_queries_are_those_of_attention(kind):
    """Attention of queries made ready here differs from that of raw ones; or of rotated ones twice."""
    rows, _ = make(DECODE, BLOCK, blocks=BLOCKS)
    layer = Layer(kind, rows)
    table = rope_table(rope_frequencies(TAIL, 100.0).to(DEVICE), 256)
    keys, *_, ready = layer.run(inputs.attention_inputs_triton, rows, True)[: READY + 1]
    raw, norm = layer.heads.raw, layer.heads.eps
    plain = torch.zeros(SLOTS, WINDOW, layer.dims[0], device=DEVICE)

    def attended(q: Tensor, *, ready: bool) -> Tensor:
        return attend_triton(
            q, keys, plain, None, None, noise(HEADS, seed=14), table, rows, ratio=0,
            head_norm_eps=norm, window=WINDOW, scale=0.1, ready=ready,
        )  # fmt: skip

    want = attended(raw, ready=False)
    torch.testing.assert_close(attended(ready, ready=True), want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(attended(ready, ready=False), want, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["csa", "hca", "ratio1"])
def test_real_widths(kind, monkeypatch):
    """At real widths and in any kind of layer: the parts, but for rounding."""
    monkeypatch.setitem(globals(), "BLOCK", 128)
    rows, _ = make([Span(127, 1), Span(3, 1), Span(0, 1)], 128, blocks=BLOCKS)
    table = KINDS[kind]
    if kind == "hca":
        monkeypatch.setitem(KINDS, kind, (128, *table[1:]))
    apart = Layer(kind, rows, dim=512, index=128).run(inputs._apart, rows, True)
    layer = Layer(kind, rows, dim=512, index=128)
    together = layer.run(inputs.attention_inputs_triton, rows, True)
    for found, want in zip(together, apart, strict=True):
        if want is not None:
            # The compilers of two kernels may contract products and sums in different places.
            assert torch.equal(found.isnan(), want.isnan())
            off = (found - want).nan_to_num().abs() > 1e-5
            assert off.float().mean() < 1e-3
