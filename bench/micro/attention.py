"""Attention kernels on a GPU at V4's widths: microseconds, bytes and FLOP per second by cut.

    python -m bench.micro.attention [--quick]

Decode rows are timed over the pools of several layers in turn, so that the L2 cache does not
flatter; a figure is per layer. Times are of a replayed CUDA graph, the median of several replays.
First every cut is compared with the torch form. Keys lie in the forms of V4, of V4.1, or as plain
bfloat16 numbers, for comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from bench.micro.timing import BANDWIDTH, RATE, replayed_us
from engine.kernels import reference
from engine.kernels.attention import Tile, attend_torch, attend_triton, tile_for
from engine.kernels.records import pack_torch
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from engine.kernels.window import window_keys_triton
from engine.plan.records import Form, Forms, forms_of

HEADS, DIM, WINDOW, TOPK, PAIRS, BLOCK = 64, 512, 128, 512, 32, 256
LAYERS = 6

#: Cuts tried beside the one that ships, by rows of a decode pass.
DECODE_TILES = {
    64: [Tile(64, 64, 1, 8, 1)],
    16: [Tile(64, 64, 4, 8, 1)],
    4: [Tile(16, 64, 5, 8, 1), Tile(16, 32, 10, 4, 0)],
    1: [Tile(16, 64, 10, 8, 1), Tile(16, 64, 10, 8, 0)],
}
WINDOW_TILES = [Tile(16, 64, 1, 8, 0), Tile(16, 64, 2, 8, 0)]
#: How keys lie, by name.
FORMS = {
    "plain": Forms(),
    "v4": forms_of(is_v41=False, is_quantised=True),
    "v41": forms_of(is_v41=True, is_quantised=True),
}


class Keywords(TypedDict):
    """What one layer's attention takes by name."""

    ratio: int
    head_norm_eps: float
    window: int
    scale: float
    window_form: Form
    entry_form: Form


@dataclass
class Layer:
    """What one layer's attention takes."""

    args: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Rows]
    keywords: Keywords


def normal(*shape: int) -> Tensor:
    """Random numbers, bfloat16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def layer(rows: Rows, kind: str, seed: int, forms: Forms) -> Layer:
    """Give random queries, keys and pools.

    Args:
        rows: the pass; its tables name the blocks.
        kind: "window", "choice" (of entries of 4 tokens) or "all" (entries of 128 tokens).
        seed: of the numbers.
        forms: of keys.
    """
    torch.manual_seed(seed)
    tokens, ratio = rows.num_rows, {"window": 0, "choice": 4, "all": 128}[kind]
    entries = choice = None
    if ratio:
        blocks = int(rows.tables.max()) + 1
        entries = pack_torch(normal(blocks, BLOCK // ratio, DIM), forms.entries, 2 * PAIRS)
    if kind == "choice":
        visible = (rows.positions + 1) // ratio
        # a random ascending choice: one entry of each of TOPK equal stretches
        step = visible[:, None] / TOPK
        shift = torch.rand(tokens, TOPK, device="cuda")
        entry = ((torch.arange(TOPK, device="cuda") + shift) * step).long()
        entry = torch.where(visible[:, None] >= TOPK, entry, torch.arange(TOPK, device="cuda"))
        n = BLOCK // ratio
        table = rows.tables[rows.seq.long()].long()
        real = entry < visible[:, None]
        entry = torch.where(real, entry, 0)
        places = table.gather(1, entry // n) * n + entry % n
        choice = torch.where(real, places, -1).int()
    freqs = reference.rope_frequencies(2 * PAIRS, 160000.0).cuda()
    args = (
        normal(tokens, HEADS * DIM),
        pack_torch(normal(tokens, DIM), forms.window, 2 * PAIRS),
        pack_torch(normal(rows.num_sequences + 1, WINDOW, DIM), forms.window, 2 * PAIRS),
        entries,
        choice,
        torch.randn(HEADS, device="cuda"),
        rope_table(freqs, rows.max_end),
        rows,
    )
    keywords: Keywords = {
        "ratio": ratio, "head_norm_eps": 1e-6, "window": WINDOW, "scale": DIM**-0.5,
        "window_form": forms.window, "entry_form": forms.entries,
    }  # fmt: skip
    return Layer(args, keywords)


def rows_of(starts: list[int], length: int) -> Rows:
    """Sequences of `length` rows, with blocks in random order."""
    count = len(starts)
    blocks = -(-(max(starts) + length) // BLOCK)
    order = 1 + torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0))

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device="cuda")

    return Rows(
        ids=torch.zeros(count * length, dtype=torch.int64, device="cuda"),
        positions=ints(p for s in starts for p in range(s, s + length)),
        seq=ints(i for i in range(count) for _ in range(length)),
        slots=ints(range(1, count + 1)),
        starts=ints(starts),
        first=ints(i * length for i in range(count)),
        lengths=ints([length] * count),
        tables=order.view(count, blocks).int().cuda(),
        block_size=BLOCK,
        max_length=length,
        max_end=max(starts) + length,
    )


def keys_read(one: Layer) -> tuple[int, int]:
    """Keys that the rows of a pass attend in all, and their bytes."""
    _, _, ring, entries, choice, *_, rows = one.args
    ratio = one.keywords["ratio"]
    keys = int((rows.positions + 1).clamp(max=WINDOW).sum())
    nbytes, more = keys * ring.shape[-1] * ring.itemsize, 0
    if choice is not None:
        more = int((choice >= 0).sum())
    elif ratio:
        more = int(((rows.positions + 1) // ratio).sum())
    if entries is not None:
        nbytes += more * entries.shape[-1] * entries.itemsize
    return keys + more, nbytes


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return ((got - want).abs().max() / want.abs().max()).item()


def measure(name: str, layers: list[Layer], tiles: list[Tile]) -> None:
    """Print one line per cut, that of service first."""
    one = layers[0]
    tokens, (keys, nbytes) = one.args[-1].num_rows, keys_read(one)
    moved = nbytes + 4 * tokens * HEADS * DIM
    products = keys * HEADS * DIM * 4
    forms = one.keywords["window_form"], one.keywords["entry_form"]
    with_entries = forms[1] if one.keywords["ratio"] else None
    shipped = tile_for(tokens, HEADS, forms[0], with_entries, torch.bfloat16)
    want = attend_torch(*one.args, **one.keywords)
    for tile in dict.fromkeys([shipped, *tiles]):
        got = attend_triton(*one.args, **one.keywords, tile=tile)
        wrong = error(got, want)
        calls = [partial(attend_triton, *a.args, **a.keywords, tile=tile) for a in layers]
        time = replayed_us(calls)
        print(
            f"{name:30} {time:9.1f} us {moved / time / BANDWIDTH * 1e8:5.1f}% read "
            f"{products / time / 1e6:6.1f} TFLOP/s = {products / time / RATE * 1e8:4.1f}%  "
            f"error {wrong:.1e}  {tile.heads}x{tile.keys} splits {tile.splits} warps {tile.warps} "
            f"ahead {tile.ahead}{'  <- shipped' if tile == shipped else ''}",
            flush=True,
        )


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    quick = parser.parse_args().quick
    print(torch.cuda.get_device_name(), torch.__version__)
    for batch, tiles in DECODE_TILES.items():
        rows = rows_of([8000 + 61 * i for i in range(batch)], 1)
        for name, forms in FORMS.items():
            for kind in ("choice", "window", "all")[: (2 if name == "v4" else 1) if quick else 3]:
                layers = [layer(rows, kind, seed, forms) for seed in range(LAYERS)]
                more = tiles if kind == "choice" and name != "plain" else []
                if kind == "window" and name != "plain":
                    more = WINDOW_TILES
                measure(f"{name} decode {kind} B={batch}", layers, more)
    for length in (8192,) if quick else (8192, 1024):
        rows = rows_of([0 if length > 1024 else 4096], length)
        for name, forms in FORMS.items():
            for kind in ("choice",) if quick else ("choice", "window", "all"):
                measure(f"{name} prefill {kind} T={length}", [layer(rows, kind, 0, forms)], [])
    for batch in (1, 64):
        rows = rows_of([8000 + i for i in range(batch)], 1)
        args = layer(rows, "window", 0, FORMS["v4"]).args
        kv = torch.randn(batch, 1536, device="cuda", dtype=torch.bfloat16)[:, 1024:]
        call = partial(
            window_keys_triton,
            kv,
            torch.ones(DIM, device="cuda"),
            1e-6,
            args[6],
            rows,
            args[2],
            form="fp8_64_tail",
            store=True,
        )
        print(f"window_keys B={batch}: {replayed_us([call] * LAYERS):.2f} us", flush=True)


if __name__ == "__main__":
    main()
