"""How the kernels of engine.kernels.mhc_kernel are cut up and launched, by numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.mhc_kernel import SLOTS, mix_row, mix_rows, open_site, split_rows
from engine.kernels.overlap import overlaps
from engine.kernels.triton_compat import triton

#: Up to so many rows there is room for the programs of two kernels.
OVERLAP_ROWS = 32
#: Up to so many rows each reads fn for itself.
FEW = 8
#: From more rows on, throughput counts and not the number of launches.
MANY = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the first kernel is cut up.

    Args:
        bt: rows per program; 1 takes `mix_row`, 16 or more take `mix_rows`.
        bd: places of d per program.
        warps: per program.
    """

    bt: int
    bd: int
    warps: int


def tiling(rows: int, dtype: torch.dtype, *, projects: bool) -> Tiling:
    """Tiling for T rows: a table by class of T."""
    if rows <= FEW:
        return Tiling(1, 64, 4)
    # So many rows are a product like any other, which cuBLAS does best.
    apart = rows > MANY and dtype == torch.bfloat16
    return Tiling(16, 32, 4) if projects and not apart else Tiling(1, 512, 4)


def mixed(
    streams: Tensor,
    closing: tuple[Tensor, Tensor, Tensor] | None,
    fn: Tensor | None,
    cut: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Close a site, sum up for the next one's logits, or both.

    Args:
        streams: R [T, S, d], contiguous.
        closing: (parts, post, comb) of the site to close, or None.
        fn: of the site to open, or None.
        cut: by default that of `tiling`.

    Returns:
        R', and sums [T, shares, SLOTS], which add up to fn . R' and in slot M to the squares of R'.
    """
    rows, count, width = streams.shape
    cut = cut or tiling(rows, streams.dtype, projects=fn is not None)
    splits = triton.cdiv(width, cut.bd)
    pieces = fn is not None and cut.bt == 1 and rows > MANY
    shape = rows, splits + (3 if pieces else 0), SLOTS
    sums = torch.empty(shape, dtype=torch.float32, device=streams.device)
    out = streams if closing is None else torch.empty_like(streams)
    parts, post, comb = closing or (streams, streams, streams)
    overlap = _overlaps(streams)
    shared = {
        "S": count,
        "P": 0 if closing is None else parts.shape[1],
        "M": 0 if fn is None else fn.shape[0],
        "SLOTS": SLOTS,
        "BD": cut.bd,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": cut.warps,
    }
    given = streams, parts, post, comb, streams if fn is None else fn, out, sums, rows, width
    if cut.bt == 1:
        project = fn is not None and not pieces
        mix_row[(rows, splits)](*given, shape[1], PROJECT=project, **shared)
    else:
        mix_rows[(triton.cdiv(rows, cut.bt), splits)](*given, splits, BT=cut.bt, **shared)
    if fn is not None and pieces:
        sums[:, splits:] = _project_many(out, fn)
    return out, sums


def _overlaps(streams: Tensor) -> bool:
    """Whether kernels overlap on these streams."""
    return overlaps(streams.device) and len(streams) <= OVERLAP_ROWS and streams.shape[2] % 4 == 0


def _project_many(streams: Tensor, fn: Tensor) -> Tensor:
    """Give fn . R of bfloat16 streams with float32's precision, as three summands [T, 3, SLOTS]."""
    count, width = fn.shape
    pieces = torch.empty((3 * SLOTS, width), dtype=torch.bfloat16, device=fn.device)
    split_rows[(SLOTS, triton.cdiv(width, 1024))](
        fn, pieces, width, M=count, SLOTS=SLOTS, BLOCK=1024
    )
    z = streams.flatten(1)
    if z.is_cuda:
        found = torch.mm(z, pieces.t(), out_dtype=torch.float32)
    else:
        found = z.float() @ pieces.float().t()
    return found.view(-1, 3, SLOTS)


def opened(
    streams: Tensor,
    sums: Tensor,
    base: Tensor | None,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
    iterations: int,
    act_group: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `open_site`; with 0 iterations it makes x alone, weighted by M = S logits or `carried`.

    Returns:
        x, xq, pre, post and comb of `HcIn`.
    """
    rows, count, width = streams.shape
    device = streams.device
    x = torch.empty((rows, width), dtype=streams.dtype, device=device)
    xq = x if act_group is None else torch.empty_like(x)
    gates = torch.empty((2, rows, count), dtype=torch.float32, device=device)
    comb = torch.empty((rows, count, count), dtype=torch.float32, device=device)
    logits = torch.empty((rows, SLOTS), dtype=torch.float32, device=device)
    shares = sums.shape[1]
    # As many rows' coefficients per program as their shares fit its registers. Without any one
    # kernel serves all numbers of rows.
    most = 128 // triton.next_power_of_2(shares) if iterations else 1
    tile = max(1, min(128, most, triton.next_power_of_2(rows)))
    others = triton.cdiv(rows, tile) if iterations else 0
    block = triton.next_power_of_2(width)

    def run(inputs: int, others: int, weights: Tensor | None) -> None:
        overlap = _overlaps(streams)
        open_site[(inputs + others,)](
            streams,
            gates if weights is None else weights,
            sums,
            gates if base is None else base,
            norm,
            x,
            xq,
            logits,
            gates[0],
            gates[1],
            comb,
            inputs,
            rows,
            width,
            eps,
            hc_eps,
            OWN=weights is None,
            GROUP=act_group or 0,
            S=count,
            M=count * (count + 2) if iterations else count,
            SLOTS=SLOTS,
            SPLITS=shares,
            ITERATIONS=iterations,
            R=tile,
            BLOCK=block,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=8 if block >= 2048 else 4,
        )

    if carried is None and iterations and rows > MANY:
        # Every row's program would work out its weights; so many rows are worth a launch for them.
        run(0, others, gates[0])
        run(rows, 0, gates[0])
    else:
        run(rows, others, carried)
    return x, xq, gates[0], gates[1], comb
