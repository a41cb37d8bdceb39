"""Compressors, indexer, choice, sampler and Engram on a GPU: microseconds per launch or per layer.

    python -m bench.micro.index [--quick]

Widths of V4-Flash (64 index heads, ratio 4 and 128) and V4.1 (32 heads, ratios 2 and 1). Times are of
a replayed CUDA graph, the median of several replays; calls go round copies of what they read, so
that the L2 cache does not flatter. Each part is first compared with its torch twin.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from bench.micro.attention import rows_of
from bench.micro.timing import BANDWIDTH, RATE, copies, replayed_us
from engine.kernels import compress, engram, index, inputs, reference, sampler, select
from engine.kernels.inputs import CompressorInput, QueryInput, WindowInput
from engine.kernels.records import pack_torch
from engine.kernels.rope import rope_table
from engine.kernels.roundtrip import round_trip
from engine.kernels.rows import Rows
from engine.plan.records import Form

D, DI, PAIRS, BLOCK, TOPK, VOCAB = 512, 128, 32, 256, 512, 129280
Lines = Iterator[tuple[str, float, str]]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(*shape, device="cuda").to(dtype)


def timed(calls: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Microseconds per call; small calls are made often enough that a replay's start is hidden."""
    return replayed_us(list(calls) * -(-12 // len(calls)), repeats)


def rope(rows: Rows) -> Tensor:
    """Turns of all positions of a pass."""
    return rope_table(reference.rope_frequencies(2 * PAIRS, 160000.0).cuda(), rows.max_end)


@contextmanager
def setting(module: object, **values: object) -> Iterator[None]:
    """Module constants, changed for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def pool_of(blocks: int, ratio: int, dim: int, form: Form) -> Tensor:
    """An empty pool of entries or index keys."""
    rows = torch.zeros(blocks, BLOCK // ratio, dim, device="cuda", dtype=torch.bfloat16)
    return torch.zeros_like(pack_torch(rows, form, 2 * PAIRS))


def compressors(rows: Rows, kinds: tuple[str, ...]) -> Lines:
    """One layer's compressor of each kind; stored entries must be the twin's but for edges."""
    table: dict[str, tuple[int, bool, int, Form]] = {
        "csa": (4, True, D, "fp8_64_tail"),
        "csa index": (4, True, DI, "hadamard_fp4_32"),
        "hca": (128, False, D, "fp8_64_tail"),
        "ratio 2": (2, False, D, "fp4_e4m3_16"),
        "ratio 1": (1, False, D, "fp4_e4m3_16"),
    }
    blocks = int(rows.tables.max()) + 1
    for kind in kinds:
        ratio, overlap, dim, form = table[kind]
        width = dim * (2 if overlap else 1)
        columns = dim if ratio == 1 else 2 * width
        ring = ratio * (2 if overlap else 1)
        each: list[Callable[[], object]] = []
        pools: list[Tensor] = []
        for _ in range(3):
            pool = pool_of(blocks, ratio, dim, form)
            slots = rows.num_sequences + 1
            state = noise(slots, ring, 2 * width) if ratio > 1 else None
            ape = noise(ratio, width) if overlap or ratio > 4 else None
            keywords = {
                "ratio": ratio, "overlap": overlap, "norm_w": 1 + noise(dim) / 9, "eps": 1e-6,
                "rope": rope(rows), "form": form, "pool": pool, "dtype": torch.bfloat16,
                "want_latent": ratio < 3,
            }  # fmt: skip
            proj = noise(rows.num_rows, columns)
            each.append(
                partial(compress.compress_triton, proj, ape, state, rows, **keywords)  # type: ignore[arg-type]
            )
            if not pools:
                twin = torch.zeros_like(pool)
                keywords["pool"] = twin
                kept = None if state is None else state.clone()
                compress.compress_torch(proj, ape, kept, rows, **keywords)  # type: ignore[arg-type]
                pools = [pool, twin]
        each[0]()
        off = (pools[0][1:] != pools[1][1:]).float().mean().item()
        time = timed(each)
        yield f"compress {kind}", time, f"differs in {off:.1e} of bytes"


def together(rows: Rows) -> Lines:
    """All inputs of a CSA layer's attention, in one launch and apart."""
    count, blocks = rows.num_rows, int(rows.tables.max()) + 1
    kinds: tuple[tuple[int, Form], ...] = ((D, "fp8_64_tail"), (DI, "hadamard_fp4_32"))
    given = []
    for _ in range(3):
        parts = [
            CompressorInput(
                noise(count, 4 * dim),
                noise(4, 2 * dim),
                noise(rows.num_sequences + 1, 8, 4 * dim),
                1 + noise(dim) / 9,
                form,
                pool_of(blocks, 4, dim, form),
            )
            for dim, form in kinds
        ]
        ring = pack_torch(
            noise(rows.num_sequences + 1, 128, D, dtype=torch.bfloat16), "fp8_64_tail", 2 * PAIRS
        )
        kv = noise(count, D, dtype=torch.bfloat16)
        window = WindowInput(kv, 1 + noise(D) / 9, ring, "fp8_64_tail")
        raw = noise(count, 64 * DI, dtype=torch.bfloat16)
        given.append((window, parts, QueryInput(raw, DI, "hadamard_fp4_32"), rope(rows), rows))
    how = {"ratio": 4, "overlap": True, "eps": 1e-6, "want_latent": False, "store": True}
    for name, call in (("one launch", inputs.attention_inputs_triton), ("apart", inputs._apart)):
        time = timed([partial(call, *args, **how) for args in given])  # type: ignore[arg-type]
        yield f"attention inputs of csa, {name}", time, ""


def choices(name: str, rows: Rows, ratio: int, heads: int, form: Form, quick: bool) -> Lines:
    """Index queries, scores and selection of one layer, for several cuts."""
    count, width = rows.num_rows, rows.max_end // ratio
    blocks = int(rows.tables.max()) + 1
    size = pool_of(1, ratio, DI, "fp4_32").numel() * blocks
    raws = [noise(count, heads * DI, dtype=torch.bfloat16) for _ in range(2)]
    queries = partial(index.index_queries_triton, head_dim=DI, form=form)
    turns = rope(rows)
    time = timed([partial(queries, raw, turns, rows) for raw in raws])
    yield f"{name} index_queries", time, ""
    weight = noise(count, heads) * (heads * DI) ** -0.5
    pools, plain = [], []
    for _ in range(copies(size, 16)):
        pool = noise(blocks, BLOCK // ratio, DI, dtype=torch.bfloat16)
        pools.append(pack_torch(pool, "fp4_32"))
        plain.append(round_trip(pool, "fp4_32"))
    q = queries(raws[0], turns, rows)
    choose = partial(select.choose_triton, rows=rows, ratio=ratio, topk=TOPK, key_form="fp4_32")
    if count <= 64 and count * width < 1 << 20:
        got, _ = choose(q, weight, pools[0])
        want, _ = select.choose_torch(
            q, weight, pools[0], rows, ratio=ratio, topk=TOPK, key_form="fp4_32"
        )
        same = [len(set(a) & set(b)) for a, b in zip(got.tolist(), want.tolist(), strict=True)]
        print(f"{name}: {min(same)} of {want.shape[1]} chosen as by the twin at least")
    seen = (rows.positions + 1) // ratio
    flop = 2 * DI * heads * int(seen.sum())
    moved = int(seen.amax()) * pools[0].shape[-1] * rows.num_sequences + 4 * int(seen.sum())
    bare = partial(index.scores_triton, rows=rows, ratio=ratio, idle=TOPK)
    score = partial(bare, key_form="fp4_32")
    last = min(count, max(1, select.CHUNK_SCORES // width))
    if rows.max_length > 1:
        flop = 2 * DI * heads * int(seen[:last].sum())
        tiles = [(64, 128, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3)]
        for tile in tiles[: 2 if quick else None]:
            with setting(index, LONG_TILE=tile):
                time = timed([partial(score, q, weight, pool, last=last) for pool in pools[:3]], 5)
            rate = f"{flop / time / 1e6:.0f} TFLOP/s = {flop / time / RATE * 1e8:.0f}%"
            yield f"{name} scores rows {last} {tile}", time, rate
        time = timed([partial(bare, q, weight, pool, last=last) for pool in plain[:3]], 5)
        yield f"{name} scores rows {last}, plain keys", time, ""
    else:
        time = timed([partial(bare, q, weight, pool) for pool in plain])
        yield f"{name} scores, plain keys", time, ""
        shorts = [(64, 4, 512), (128, 4, 512), (128, 8, 264), (64, 4, 1024), (32, 4, 1024)]
        for short in shorts[: 3 if quick else None]:
            with setting(index, SHORT_TILE=short):
                time = timed([partial(score, q, weight, pool) for pool in pools])
            share = f"{moved / time / BANDWIDTH * 1e8:.0f}% read"
            yield f"{name} scores {short}", time, share
    scores, _ = score(q, weight, pools[0], last=last)
    places = torch.empty(last, min(TOPK, width), dtype=torch.int32, device="cuda")
    part = slice(0, last)
    cuts = [(8192, (256, 1024)), (4096, (256, 512)), (16384, (512, 1024))]
    for segment, per_warp in cuts[: 2 if quick else None]:
        with setting(select, SEGMENT=segment, PER_WARP=per_warp):
            call = partial(select._choose, scores, places, rows, part, ratio, TOPK)
            time = timed([call, call], 7)
        yield f"{name} select segment {segment} per warp {per_warp}", time, ""
    time = timed([partial(choose, q, weight, pool) for pool in pools[:6]], 5)
    yield f"{name} choose in all", time, f"{count} rows, {width} entries"


def candidates(rows: Rows) -> Lines:
    """V4.1's candidate source and a reader, 32 heads, ratio 1."""
    pool = noise(int(rows.tables.max()) + 1, BLOCK, DI, dtype=torch.bfloat16)
    pool = pack_torch(pool, "fp4_32")
    q = noise(rows.num_rows, 32, DI, dtype=torch.bfloat16)
    weight = noise(rows.num_rows, 32) / 64
    choose = partial(
        select.choose_triton, q, weight, pool, rows, ratio=1, topk=TOPK, key_form="fp4_32"
    )
    source = partial(choose, candidate_group=8, candidate_topk=2048)
    _, made = source()
    reader = partial(choose, candidates=made, candidate_group=8)
    shape = f"B={rows.num_rows} {rows.max_end} entries"
    yield f"candidate source {shape}", timed([source, source], 7), ""
    yield f"candidate reader {shape}", timed([reader, reader], 7), ""


def sampling(batch: int) -> Lines:
    """The sampler for greedy rows, plain sampling and nuclei."""
    logits = noise(batch, VOCAB) * 2
    for name, heat, mass in (("greedy", 0.0, 1.0), ("sampled", 1.0, 1.0), ("nucleus", 0.8, 0.9)):
        given = (
            logits,
            torch.full((batch,), heat, dtype=torch.float64, device="cuda"),
            torch.full((batch,), mass, dtype=torch.float64, device="cuda"),
            torch.arange(batch, device="cuda"),
            torch.arange(batch, device="cuda", dtype=torch.int32),
        )
        same = torch.equal(sampler.sample_triton(*given)[0], sampler.sample_torch(*given)[0])
        call = partial(sampler.sample_triton, *given)
        yield f"sample {name} B={batch}", timed([call, call], 7), f"as twin: {same}"


def engrams(rows: Rows) -> Lines:
    """Lookup from both memories and the gate, V4.1's widths and a million rows."""
    count, d = rows.num_rows, 5120
    primes = np.array([41011 + 30 * i for i in range(24)])
    hashes = engram.Hashes(
        torch.randint(1, 1 << 40, (4,), device="cuda"),
        torch.tensor(primes, device="cuda"),
        torch.tensor(np.cumsum(primes) - primes, device="cuda"),
    )
    data = torch.randint(0, 0x78, (int(primes.sum()), 256), dtype=torch.uint8)
    scale = torch.randint(120, 128, (len(data), 8), dtype=torch.uint8)
    fold = torch.randint(0, 99092, (VOCAB,), device="cuda")
    history = torch.zeros(rows.num_sequences + 1, 4, dtype=torch.int64, device="cuda")
    for place, weight, powers in (
        ("device", data.cuda(), scale.cuda()),
        ("pinned", data.pin_memory(), scale.pin_memory()),
    ):
        call = partial(
            engram.engram_lookup_triton, rows, fold, history, hashes,
            weight.view(torch.float8_e4m3fn), powers, pad=0, image=-1, dtype=torch.bfloat16,
        )  # fmt: skip
        yield f"engram lookup {place} T={count}", timed([call, call], 7), ""
    streams = [noise(count, 4, d, dtype=torch.bfloat16) for _ in range(4)]
    projected = noise(count, 5 * d, dtype=torch.bfloat16)
    calls = [
        partial(engram.engram_apply_triton, s, projected, noise(4, d), rows, eps=1e-20, image=-1)
        for s in streams
    ]
    yield f"engram gate T={count}", timed(calls), ""


def parts(quick: bool) -> dict[str, Callable[[], Lines]]:
    """What is measured, by name."""
    kinds = ("csa", "csa index", "hca", "ratio 2", "ratio 1")

    def compression() -> Lines:
        for batch in (1, 64) if quick else (1, 16, 64):
            rows = rows_of([1024 + 4 * i + 3 for i in range(batch)], 1)
            for n, t, note in chain(together(rows), compressors(rows, kinds)):
                yield f"{n} B={batch}", t, note
        yield from compressors(rows_of([0], 8192), kinds)

    def decode() -> Lines:
        shapes = [(1, 65535), (16, 32767), (1, 384), (64, 8191)]
        for batch, end in shapes[: 2 if quick else None]:
            rows = rows_of([end] * batch, 1)
            name = f"V4 B={batch} {end + 1}"
            yield from choices(name, rows, 4, 64, "hadamard_fp4_32", quick)
        rows = rows_of([65535], 1)
        yield from choices("V4.1 B=1 65536", rows, 1, 32, "fp4_32", quick)
        yield from candidates(rows)

    def prompts() -> Lines:
        for start in (0,) if quick else (0, 57344):
            rows = rows_of([start], 8192)
            yield from choices(f"V4 T=8192 at {start}", rows, 4, 64, "hadamard_fp4_32", quick)

    def sample() -> Lines:
        for batch in (1, 16, 64):
            yield from sampling(batch)

    def lookup() -> Lines:
        passes = (rows_of([1000], 1), rows_of([1000] * 64, 1), rows_of([0], 8192))
        for rows in passes:
            yield from engrams(rows)

    return {
        "compress": compression,
        "decode": decode,
        "prompts": prompts,
        "sample": sample,
        "engram": lookup,
    }


def main() -> None:
    """Measure all parts, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--only", choices=list(parts(True)), help="one part")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, part in parts(options.quick).items():
        if options.only in (None, name):
            for line, time, note in part():
                print(f"{line:64} {time:9.1f} us  {note}", flush=True)


if __name__ == "__main__":
    main()
