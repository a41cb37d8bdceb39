"""Index keys, queries, scores and the choice of entries: twins and kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.kernels import index, reference as ops, roundtrip as rt, select
from engine.kernels.formats import Matrix
from engine.kernels.places import entry_places
from engine.kernels.records import pack_torch, unpack_torch
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from tests.engine.kernels.batches import Span, make
from tests.engine.kernels.passes import DEVICE, noise, poisoned

BLOCK, BLOCKS = 16, 40
FREQS = ops.rope_frequencies(8, 100.0)
DECODE = [Span(0, 1), Span(2, 1), Span(97, 1), Span(40, 1)]
VERIFY = [Span(37, 2), Span(0, 3)]
CHUNKS = [Span(0, 3), Span(50, 10), Span(61, 1)]
PASSES = {"decode": DECODE, "verify": VERIFY, "chunks": CHUNKS}


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotation as the reference model does it."""
    return ops.rope_(x.clone(), ops.rope_turns(positions, FREQS.to(DEVICE), torch.float32))


def filled(rows: Rows, ratio: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A pool with keys where the sequences of a pass have entries, NaN elsewhere."""
    pool = poisoned(BLOCKS, rows.block_size // ratio, dim, dtype=dtype)
    ends = rows.starts + rows.lengths
    for g, end in enumerate(ends.tolist()):
        entries = torch.arange(end // ratio, device=DEVICE)
        places = entry_places(rows, torch.tensor(g, device=DEVICE), entries, ratio)
        pool.view(-1, dim)[places] = noise(len(entries), dim, seed=g).to(dtype)
    return pool


# ---------------------------------------------------------------- keys and queries


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("spans", PASSES)
@pytest.mark.parametrize("ratio", [1, 2])
def test_index_keys_come_from_the_latent(ratio, spans, form):
    """Keys of completed groups equal norm, rotation and storage form; nothing else is written."""
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS)
    latent, wk = noise(rows.num_rows, 64), noise(32, 64, seed=1) / 8
    norm = 1 + 0.1 * noise(32, seed=2)
    pool = poisoned(BLOCKS, BLOCK // ratio, 32, dtype=torch.float32, form="fp4_32")
    run = getattr(index, f"index_keys_from_latent_{form}")
    table = rope_table(FREQS.to(DEVICE), 128)
    run(latent, Matrix("plain", wk), norm, 1e-6, table, rows, pool, ratio=ratio, form="fp4_32")
    done = (rows.positions + 1) % ratio == 0
    entry = rows.positions[done] // ratio
    key = ops.rms_norm(ops.linear(latent[done], wk), norm, 1e-6)
    expect = rt.round_trip_fp4(turned(key, entry * ratio), 32)
    places = entry_places(rows, rows.seq[done], entry, ratio)
    found = unpack_torch(pool, "fp4_32", 32, 0, torch.float32).view(-1, 32)
    assert ((found[places] - expect).abs() > 1e-4).float().mean() < 0.003
    untouched = torch.ones(len(found), dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    untouched[: BLOCK // ratio] = False
    assert found[untouched].isnan().all()
    assert found[: BLOCK // ratio].isfinite().all()


@pytest.mark.parametrize("storage", ["none", "fp4_32", "hadamard_fp4_32"])
@pytest.mark.parametrize("spans", ["decode", "chunks"])
def test_index_queries(spans, storage):
    """Twin and kernel rotate every head to its row's position and round it."""
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS)
    raw = noise(rows.num_rows, 20 * 32 + 4)[:, 4:]  # 20 heads do not fill a tile; strided rows
    table = rope_table(FREQS.to(DEVICE), 128)
    expect = turned(raw.reshape(len(raw), 20, 32), rows.positions)
    if storage == "hadamard_fp4_32":
        expect = expect @ ops.hadamard(32, torch.float32, expect.device)
    if storage != "none":
        expect = rt.round_trip_fp4(expect, 32)
    for form in ("torch", "triton"):
        run = getattr(index, f"index_queries_{form}")
        found = run(raw, table, rows, head_dim=32, form=storage)
        assert found.shape == expect.shape
        assert ((found - expect).abs() > 1e-4).float().mean() < 0.003, form


# ---------------------------------------------------------------- scores


def reference_scores(q: Tensor, w: Tensor, pool: Tensor, rows: Rows, ratio: int) -> Tensor:
    """Row by row, as the formula says."""
    width = max(1, rows.max_end // ratio)
    out = torch.full((len(q), width), -torch.inf, device=DEVICE)
    for t, (p, g) in enumerate(zip(rows.positions.tolist(), rows.seq.tolist(), strict=True)):
        entries = torch.arange((p + 1) // ratio, device=DEVICE)
        places = entry_places(rows, torch.tensor(g, device=DEVICE), entries, ratio)
        keys = pool.view(-1, pool.shape[-1])[places]
        out[t, : len(entries)] = ops.index_scores(q[t : t + 1], keys, w[t : t + 1])[0]
    return out


@pytest.mark.parametrize("storage", ["none", "fp4_32"])
@pytest.mark.parametrize("spans", PASSES)
@pytest.mark.parametrize("ratio", [1, 4])
def test_scores(ratio, spans, storage):
    """Twin and kernel give the formula's scores of all entries that a row sees, -inf beyond."""
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS)
    q, w = noise(rows.num_rows, 6, 32), noise(rows.num_rows, 6, seed=1)
    pool = pack_torch(filled(rows, ratio, 32, torch.float32), storage)
    values = unpack_torch(pool, storage, 32, 0, torch.float32)
    expect = reference_scores(q, w, values, rows, ratio)
    twin = index.scores_torch(q, w, pool, rows, ratio=ratio, key_form=storage)
    torch.testing.assert_close(twin, expect, atol=2e-5, rtol=1e-5)
    found, best = index.scores_triton(
        q, w, pool, rows, ratio=ratio, idle=0, key_form=storage, candidate_group=4, build=True
    )
    seen = expect > -torch.inf
    torch.testing.assert_close(found[seen], expect[seen], atol=2e-5, rtol=1e-5)
    for group in range(best.shape[1]):
        highest = expect[:, group * 4 : group * 4 + 4].amax(1)
        real = highest > -torch.inf
        torch.testing.assert_close(best[real, group], highest[real], atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------- the choice


def small_integers(rows: Rows, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, head weights and keys whose scores are exact, with many ties and zeros."""
    g = torch.Generator().manual_seed(rows.num_rows)
    q = torch.randint(-1, 2, (rows.num_rows, 4, 16), generator=g).float().to(DEVICE)
    w = torch.randint(-1, 3, (rows.num_rows, 4), generator=g).float().to(DEVICE)
    pool = filled(rows, ratio, 16, torch.float32)
    return q, w, torch.where(pool.isnan(), pool, pool.round())


def expected_choice(scores: Tensor, rows: Rows, ratio: int, topk: int) -> list[list[int]]:
    """The choice in plain Python: sort by falling score, then by entry."""
    lists = []
    for g, row in zip(rows.seq.tolist(), scores.tolist(), strict=True):
        real = [(-s, j) for j, s in enumerate(row) if s > float("-inf")]
        chosen = sorted(j for _, j in sorted(real)[:topk])
        per_block = rows.block_size // ratio
        table = rows.tables[g].tolist()
        lists.append([table[j // per_block] * per_block + j % per_block for j in chosen])
    return lists


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize(
    ("topk", "segment"), [(1, 8192), (7, 8192), (200, 8192), (7, 16), (16, 32)]
)
@pytest.mark.parametrize("spans", PASSES)
def test_choice_is_exact_with_ties_to_the_lowest(spans, topk, form, segment, monkeypatch):
    """Every row's places equal a plain sort by (score, entry), then -1; in one part or many."""
    monkeypatch.setattr(select, "SEGMENT", segment)
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS)
    q, w, keys = small_integers(rows, 1)
    places, candidates = getattr(select, f"choose_{form}")(q, w, keys, rows, ratio=1, topk=topk)
    assert candidates is None
    assert places.shape == (rows.num_rows, min(topk, rows.max_end))
    expect = expected_choice(reference_scores(q, w, keys, rows, 1), rows, 1, topk)
    for row, (found, wanted) in enumerate(zip(places.tolist(), expect, strict=True)):
        assert found == wanted + [-1] * (len(found) - len(wanted)), row


@pytest.mark.parametrize(
    ("spans", "form", "merged"),
    [(s, f, 16384) for s in PASSES for f in ("torch", "triton")] + [("decode", "triton", 8)],
)
def test_candidates_are_the_references(spans, form, merged, monkeypatch):
    """Groups kept equal reference.candidate_entries, and a reader chooses only among them.

    With few groups in registers, and with more than those hold.
    """
    monkeypatch.setattr(select, "MERGED", merged)
    group, kept, topk, ratio = 4, 5, 6, 1
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS)
    q, w, keys = small_integers(rows, ratio)
    choose = getattr(select, f"choose_{form}")
    own, made = choose(
        q, w, keys, rows, ratio=ratio, topk=topk, candidate_group=group, candidate_topk=kept
    )
    scores = reference_scores(q, w, keys, rows, ratio)
    seen = (rows.positions.long() + 1) // ratio
    mask = ops.candidate_entries(scores, seen, group, kept)
    shown = torch.arange(scores.shape[1], device=DEVICE) < seen[:, None]
    spread = made.repeat_interleave(group, 1)[:, : scores.shape[1]]
    assert torch.equal(spread & shown, mask & shown)
    # The source's own choice is not limited.
    for found, wanted in zip(own.tolist(), expected_choice(scores, rows, ratio, topk), strict=True):
        assert [p for p in found if p >= 0] == wanted
    other = -w
    places, passed = choose(
        q, other, keys, rows, ratio=ratio, topk=topk, candidates=made, candidate_group=group
    )
    assert passed is made
    limited = reference_scores(q, other, keys, rows, ratio).masked_fill(~mask, -torch.inf)
    for found, wanted in zip(
        places.tolist(), expected_choice(limited, rows, ratio, topk), strict=True
    ):
        assert [p for p in found if p >= 0] == wanted


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("spans", PASSES)
def test_stored_keys_choose_as_their_values_do(spans, form):
    """Keys read from records choose other entries than the same values as plain numbers."""
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS)
    q, w = noise(rows.num_rows, 6, 32), noise(rows.num_rows, 6, seed=1)
    pool = pack_torch(filled(rows, 1, 32, torch.float32), "fp4_32")
    values = unpack_torch(pool, "fp4_32", 32, 0, torch.float32)
    choose = getattr(select, f"choose_{form}")
    found, _ = choose(q, w, pool, rows, ratio=1, topk=7, key_form="fp4_32")
    assert torch.equal(found, choose(q, w, values, rows, ratio=1, topk=7)[0])


@pytest.mark.parametrize("max_end", [0, 3000])
@pytest.mark.parametrize("topk", [1, 7, 16])
@pytest.mark.parametrize("spans", PASSES)
def test_what_idle_rows_ask_is_not_read(spans, topk, max_end, monkeypatch):
    """A row that sees no more than topk entries may have any queries, and scores nobody wrote any value."""
    rows, _ = make(PASSES[spans], BLOCK, blocks=BLOCKS, max_end=max_end)
    q, w, keys = small_integers(rows, 1)
    want, _ = select.choose_triton(q, w, keys, rows, ratio=1, topk=topk)
    idle = rows.positions + 1 <= topk
    q[idle] = torch.nan
    empty = Tensor.new_empty

    def poison(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poison)
    found, _ = select.choose_triton(q, w, keys, rows, ratio=1, topk=topk)
    assert torch.equal(found, want)
    if not idle.all():  # queries of the others are
        q[~idle] = torch.nan
        assert not torch.equal(select.choose_triton(q, w, keys, rows, ratio=1, topk=topk)[0], want)


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_host_bound_does_not_change_the_choice(form):
    """A graph captured for long sequences chooses for short ones what a fitting one does."""
    rows, _ = make(DECODE, BLOCK, blocks=BLOCKS)
    q, w, keys = small_integers(rows, 1)
    choose = getattr(select, f"choose_{form}")
    fitting, _ = choose(q, w, keys, rows, ratio=1, topk=7)
    bounded, _ = choose(q, w, keys, replace(rows, max_end=3000), ratio=1, topk=7)
    assert torch.equal(fitting, bounded)


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_chunks_of_rows_do_not_change_the_choice(form, monkeypatch):
    """Rows scored a few at a time choose what they choose together."""
    rows, _ = make(CHUNKS, BLOCK, blocks=BLOCKS)
    q, w, keys = small_integers(rows, 1)
    choose = getattr(select, f"choose_{form}")
    kinds = {"candidate_group": 4, "candidate_topk": 3}
    whole = choose(q, w, keys, rows, ratio=1, topk=7, **kinds)
    monkeypatch.setattr(select, "CHUNK_SCORES", 6 * rows.max_end)
    monkeypatch.setattr(index, "_GATHERED", 6 * rows.max_end)
    parts = choose(q, w, keys, rows, ratio=1, topk=7, **kinds)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@settings(max_examples=20)
@given(
    scores=st.lists(
        st.sampled_from([-torch.inf, -3.5, -1e-30, -0.0, 0.0, 1e-38, 1.0, 1.0000001, 3e38]),
        min_size=1,
        max_size=64,
    ),
    k=st.integers(1, 20),
)
def test_selection_of_awkward_scores(scores, k):
    """Signed zeros tie, tiny and huge scores keep their order, -inf is never chosen."""
    rows, _ = make([Span(len(scores) - 1, 1)], BLOCK, blocks=BLOCKS)
    given_scores = torch.tensor([scores], device=DEVICE)
    places = torch.full((1, min(k, len(scores))), -2, dtype=torch.int32, device=DEVICE)
    select._choose(given_scores, places, rows, slice(0, 1), 1, 0)
    [wanted] = expected_choice(given_scores, rows, 1, k)
    assert places[0].tolist() == wanted + [-1] * (places.shape[1] - len(wanted))


def test_planted_faults_are_seen(monkeypatch):
    """Ties to the highest, a sum of the absolute values, an entry too many: each shows."""
    rows, _ = make(DECODE, BLOCK, blocks=BLOCKS)
    q, w, keys = small_integers(rows, 1)
    good, _ = select.choose_triton(q, w, keys, rows, ratio=1, topk=7)

    select_entries = ops.select_entries

    def highest_wins(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        chosen, real = select_entries(scores.flip(1), k)
        return scores.shape[1] - 1 - chosen, real

    def unsigned(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.bmm(weights[:, None], (q @ keys.transpose(-1, -2)).abs()).squeeze(1)

    for name, fault in (("select_entries", highest_wins), ("index_scores", unsigned)):
        with monkeypatch.context() as patch:
            patch.setattr(ops, name, fault)
            bad, _ = select.choose_torch(q, w, keys, rows, ratio=1, topk=7)
        assert not torch.equal(good, bad), name
    beyond = replace(rows, positions=rows.positions + 1)
    bad, _ = select.choose_torch(q, w, torch.nan_to_num(keys, 9.0), beyond, ratio=1, topk=7)
    assert not torch.equal(good, bad)


# ---------------------------------------------------------------- real shapes


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spans", "ratio", "heads"),
    [
        ([Span(65535, 1), Span(2047, 1), Span(0, 1), Span(40000, 1)], 4, 64),
        ([Span(65535, 1), Span(9, 1)], 1, 32),
        ([Span(0, 700), Span(30000, 400)], 4, 64),
        ([Span(20000, 200)], 2, 32),
    ],
)
def test_real_shapes(spans, ratio, heads, monkeypatch):
    """At real widths, kernels choose what the twin chooses, up to scores that differ by rounding."""
    monkeypatch.setitem(globals(), "BLOCKS", 700)
    rows, _ = make(spans, 256, blocks=700)
    q = rt.round_trip(noise(rows.num_rows, heads, 128).bfloat16(), "fp4_32")
    w = noise(rows.num_rows, heads, seed=1) / 90
    pool = pack_torch(filled(rows, ratio, 128, torch.bfloat16), "fp4_32")
    how = {"ratio": ratio, "topk": 512, "key_form": "fp4_32"}
    places, _ = select.choose_triton(q, w, pool, rows, **how)
    expect, _ = select.choose_torch(q, w, pool, rows, **how)
    assert places.shape == expect.shape
    assert torch.equal((places >= 0).sum(1), (expect >= 0).sum(1))
    same = [
        len(set(a) & set(b)) / len(set(b))
        for a, b in zip(places.tolist(), expect.tolist(), strict=True)
    ]
    assert min(same) > 0.98
    assert sum(same) / len(same) > 0.999


@pytest.mark.gpu
def test_real_shapes_are_exact_where_scores_are():
    """64k entries of integer scores, in segments: equal to the twin, candidates too."""
    rows, _ = make([Span(65535, 1), Span(50001, 1), Span(700, 1)], 256, blocks=700)
    g = torch.Generator().manual_seed(0)
    q = torch.randint(-1, 2, (3, 32, 128), generator=g).to(DEVICE, torch.bfloat16)
    w = torch.randint(-2, 4, (3, 32), generator=g).float().to(DEVICE)
    pool = torch.randint(-1, 2, (700, 256, 128), generator=g).to(DEVICE, torch.bfloat16)
    pool = pack_torch(pool, "fp4_32")  # exact too: -1, 0 and 1 are e2m1 numbers
    how = {"ratio": 1, "topk": 512, "candidate_group": 8, "candidate_topk": 2048}
    how |= {"key_form": "fp4_32"}
    places, made = select.choose_triton(q, w, pool, rows, **how)
    expect, wanted = select.choose_torch(q, w, pool, rows, **how)
    assert torch.equal(places, expect)
    shown = torch.arange(made.shape[1], device=DEVICE) * 8 < (rows.positions + 1)[:, None]
    assert torch.equal(made & shown, wanted & shown)


@pytest.mark.gpu
def test_replay_is_eager():
    """A captured choice, replayed for other lengths and blocks, equals an eager one bit for bit."""
    rows, _ = make([Span(9000, 1), Span(40, 1)], 256, blocks=700, max_end=65536)
    rows = replace(rows, tables=torch.zeros(2, 256, dtype=torch.int32, device=DEVICE))
    q = rt.round_trip(noise(2, 64, 128).bfloat16(), "fp4_32")
    w = noise(2, 64, seed=1)
    pool = pack_torch(noise(700, 64, 128, seed=2).bfloat16(), "fp4_32")
    run = {"ratio": 4, "topk": 512, "candidate_group": 8, "candidate_topk": 1024}
    run |= {"key_form": "fp4_32"}
    select.choose_triton(q, w, pool, rows, **run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = select.choose_triton(q, w, pool, rows, **run)
    for positions in ([65535, 3], [2000, 2052], [33000, 0]):
        rows.positions.copy_(torch.tensor(positions))
        rows.tables.copy_(1 + torch.randperm(699)[:512].view(2, 256))
        graph.replay()
        eager = select.choose_triton(q, w, pool, rows, **run)
        assert torch.equal(captured[0], eager[0])
        seen = (rows.positions + 1) // 4
        shown = torch.arange(captured[1].shape[1], device=DEVICE) * 8 < seen[:, None]
        assert torch.equal(captured[1] & shown, eager[1] & shown)
