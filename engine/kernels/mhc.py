"""Residual streams between sublayers: mixing logits, gates, Sinkhorn, collapse and expand.

R [T, S, d] are S streams of T rows. A site turns R into its sublayer's input x [T, d] and into
coefficients (pre, post, comb) that put the sublayer's output back. V4 weighs the input with the
site's own pre, V4.1 with the pre of the site before (`carried`). Statistics, gates and mixing are
float32 whatever R is stored in. Source: model.md 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.mhc_kernel import SLOTS, mix_row, open_site, project_rows, split_rows
from engine.kernels.overlap import overlaps
from engine.kernels.reference import rms_norm
from engine.kernels.roundtrip import round_trip_fp8
from engine.kernels.triton_compat import triton


@dataclass(frozen=True, slots=True)
class HcIn:
    """What a site makes of the streams.

    Args:
        x: normed sublayer input [T, d], in the streams' dtype.
        xq: x rounded as an FP8 linear's input; x itself where nothing is rounded.
        pre: float32 [T, S]; the next site's `carried` in V4.1.
        post: float32 [T, S].
        comb: float32 [T, S, S], first axis the stream it comes from.
    """

    x: Tensor
    xq: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _mixes(streams: Tensor, fn: Tensor, base: Tensor, eps: float) -> Tensor:
    z = _wide(streams).flatten(1)
    rho = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return F.linear(z, fn.to(z.dtype)) * rho + base.to(z.dtype)


def _sinkhorn(logits: Tensor, hc_eps: float, iterations: int) -> Tensor:
    comb = logits.softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return comb


def _normed(streams: Tensor, weights: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of the weighted sum of streams, which is rounded to their dtype before."""
    wide = _wide(streams)
    u = (wide * weights[:, :, None].to(wide.dtype)).sum(1).to(streams.dtype)
    return rms_norm(_wide(u), norm.to(wide.dtype), eps).to(streams.dtype)


def hc_in_torch(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
    iterations: int,
    act_group: int | None,
) -> HcIn:
    """Open a site.

    Args:
        streams: R [T, S, d].
        fn: float32 [S * (S + 2), S * d], its scales multiplied in.
        base: float32 [S * (S + 2)].
        norm: float32 [d], the site's RMSNorm weight.
        carried: weights of the input [T, S] (V4.1), None for the site's own pre (V4).
        eps: of the norms.
        hc_eps: added to pre and in every step of Sinkhorn.
        iterations: of Sinkhorn, the first one the softmax with its division.
        act_group: group of xq's FP8 rounding, None for none.
    """
    count = streams.shape[1]
    mixes = _mixes(streams, fn, base, eps)
    gates = mixes[:, : 2 * count].sigmoid()
    pre, post = gates[:, :count] + hc_eps, 2 * gates[:, count:]
    comb = _sinkhorn(mixes[:, 2 * count :].view(-1, count, count), hc_eps, iterations)
    x = _normed(streams, pre if carried is None else carried, norm, eps)
    return HcIn(x, x if act_group is None else round_trip_fp8(x, act_group), pre, post, comb)


def hc_out_torch(streams: Tensor, parts: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Close a site: R'_j = post_j * y + sum_i comb[i, j] * R_i.

    Args:
        streams: R [T, S, d].
        parts: summands [T, P, d] of the sublayer's output, added in order in float32; y is their
            sum in the streams' dtype.
        post: float32 [T, S].
        comb: float32 [T, S, S].

    Returns:
        R' [T, S, d] in the streams' dtype.
    """
    wide = _wide(streams)
    total = parts[:, 0].to(wide.dtype)
    for part in parts.unbind(1)[1:]:
        total = total + part
    y = total.to(streams.dtype).to(wide.dtype)
    mixed = torch.einsum("tij,tid->tjd", comb.to(wide.dtype), wide)
    return (post[:, :, None].to(wide.dtype) * y[:, None] + mixed).to(streams.dtype)


def hc_turn_torch(
    streams: Tensor,
    parts: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
    iterations: int,
    act_group: int | None,
) -> tuple[Tensor, HcIn]:
    """Close one site and open the next: `hc_out`, then `hc_in` of its result.

    Args:
        streams: R [T, S, d] as the closing site saw it.
        parts: as in `hc_out`.
        post: as in `hc_out`.
        comb: as in `hc_out`.
        fn: of the opening site, as are the rest; see `hc_in`.
        base: see `hc_in`.
        norm: see `hc_in`.
        carried: see `hc_in`; in V4.1 the closing site's pre.
        eps: see `hc_in`.
        hc_eps: see `hc_in`.
        iterations: see `hc_in`.
        act_group: see `hc_in`.

    Returns:
        R' and the opened site.
    """
    mixed = hc_out_torch(streams, parts, post, comb)
    opened = hc_in_torch(
        mixed,
        fn,
        base,
        norm,
        carried,
        eps=eps,
        hc_eps=hc_eps,
        iterations=iterations,
        act_group=act_group,
    )
    return mixed, opened


def _check_head(fn: Tensor | None, base: Tensor | None, carried: Tensor | None) -> None:
    if (fn is None) != (base is None) or (fn is None) == (carried is None):
        raise ValueError("hc_head: expected fn and base (V4), or carried alone (V4.1)")


def hc_head_torch(
    streams: Tensor,
    fn: Tensor | None,
    base: Tensor | None,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
) -> Tensor:
    """Collapse the streams after the last layer and norm the result.

    Args:
        streams: R [L, S, d], the rows whose logits are wanted.
        fn: float32 [S, S * d], its scale multiplied in (V4); None to use `carried` (V4.1).
        base: float32 [S] (V4), None in V4.1.
        norm: float32 [d], the final RMSNorm weight.
        carried: pre of the last site [L, S] (V4.1), None in V4.
        eps: of the norms.
        hc_eps: added to V4's pre.

    Returns:
        [L, d] in the streams' dtype.

    Raises:
        ValueError: neither or both of (fn, base) and carried are given.
    """
    _check_head(fn, base, carried)
    weights = carried
    if fn is not None and base is not None:
        weights = _mixes(streams, fn, base, eps).sigmoid() + hc_eps
    assert weights is not None
    return _normed(streams, weights, norm, eps)


# ---------------------------------------------------------------- Triton

#: Programs that keep an H200 busy.
_PROGRAMS = 264
#: Up to so many rows there is room for the programs of two kernels.
OVERLAP_ROWS = 32
#: From more rows on, throughput counts and not the number of launches.
_MANY = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one of the first kernels is cut up.

    Args:
        bt: rows per program; 1 takes `mix_row`, more takes `project_rows`.
        bd: places of d per step.
        splits: shares of d.
        warps: per program.
    """

    bt: int
    bd: int
    splits: int
    warps: int


def tilings(rows: int, width: int) -> tuple[Tiling, ...]:
    """Tilings for T rows of streams of width d: a table by class of T.

    One: closing and projecting are one kernel, which reads fn for each row. Two: a kernel each.
    """
    if rows <= 8:
        return (Tiling(1, 64, triton.cdiv(width, 64), 4),)
    splits = max(1, min(_PROGRAMS // triton.cdiv(rows, 16), width // 128))
    return Tiling(1, 512, triton.cdiv(width, 512), 4), Tiling(16, 64, splits, 4)


def _shares(width: int, cut: Tiling) -> tuple[int, int]:
    """Places of d in a share, and how many shares there are."""
    share = triton.cdiv(triton.cdiv(width, cut.splits), cut.bd) * cut.bd
    return share, triton.cdiv(width, share)


def _mixed(
    streams: Tensor,
    closing: tuple[Tensor, Tensor, Tensor] | None,
    fn: Tensor | None,
    cuts: tuple[Tiling, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Close a site, sum up for the next one's logits, or both.

    Args:
        streams: R [T, S, d], contiguous.
        closing: (parts, post, comb) of the site to close, or None.
        fn: of the site to open, or None.
        cuts: tilings of one kernel or two, by default those of `tilings`.

    Returns:
        R', and sums [T, shares, SLOTS], which add up to fn . R' and in slot M to the squares of R'.
    """
    rows, count, width = streams.shape
    cuts = cuts or tilings(rows, width)
    share, splits = _shares(width, cuts[0])
    apart = len(cuts) == 2 and fn is not None
    # So many rows are a product like any other, which cuBLAS does best.
    pieces = apart and rows > _MANY and streams.dtype == torch.bfloat16
    more = (3 if pieces else _shares(width, cuts[1])[1]) if apart else 0
    shape = rows, splits + more, SLOTS
    sums = torch.empty(shape, dtype=torch.float32, device=streams.device)
    out = streams if closing is None else torch.empty_like(streams)
    parts, post, comb = closing or (streams, streams, streams)
    overlap = _overlaps(streams)
    mix_row[(rows, splits)](
        streams,
        parts,
        post,
        comb,
        streams if fn is None else fn,
        out,
        sums,
        rows,
        width,
        share,
        splits + more,
        S=count,
        P=0 if closing is None else parts.shape[1],
        M=0 if fn is None else fn.shape[0],
        PROJECT=fn is not None and not apart,
        SLOTS=SLOTS,
        BD=cuts[0].bd,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=cuts[0].warps,
    )
    if fn is not None and pieces:
        sums[:, splits:] = _project_many(out, fn)
    elif fn is not None and apart:
        share, _ = _shares(width, cuts[1])
        project_rows[(triton.cdiv(rows, cuts[1].bt), more)](
            out,
            fn,
            sums,
            rows,
            width,
            share,
            splits + more,
            splits,
            S=count,
            M=fn.shape[0],
            SLOTS=SLOTS,
            BT=cuts[1].bt,
            BD=cuts[1].bd,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=cuts[1].warps,
        )
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


def _opened(
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
) -> HcIn:
    """Run `open_site`; with 0 iterations it makes x alone, weighted by M = S logits or `carried`."""
    rows, count, width = streams.shape
    device = streams.device
    x = torch.empty((rows, width), dtype=streams.dtype, device=device)
    xq = x if act_group is None else torch.empty_like(x)
    gates = torch.empty((2, rows, count), dtype=torch.float32, device=device)
    comb = torch.empty((rows, count, count), dtype=torch.float32, device=device)
    logits = torch.empty((rows, SLOTS), dtype=torch.float32, device=device)
    shares = sums.shape[1]
    # As many rows' coefficients per program as their shares fit its registers.
    tile = max(1, min(128, 128 // triton.next_power_of_2(shares), triton.next_power_of_2(rows)))
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

    if carried is None and iterations and rows > _MANY:
        # Every row's program would work out its weights; so many rows are worth a launch for them.
        run(0, others, gates[0])
        run(rows, 0, gates[0])
    else:
        run(rows, others, carried)
    return HcIn(x, xq, gates[0], gates[1], comb)


def hc_in_triton(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
    iterations: int,
    act_group: int | None,
) -> HcIn:
    """`hc_in_torch` in two kernels."""
    _, sums = _mixed(streams, None, fn)
    return _opened(
        streams,
        sums,
        base,
        norm,
        carried,
        eps=eps,
        hc_eps=hc_eps,
        iterations=iterations,
        act_group=act_group,
    )


def hc_out_triton(streams: Tensor, parts: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`hc_out_torch` in one kernel."""
    return _mixed(streams, (parts, post, comb), None)[0]


def hc_turn_triton(
    streams: Tensor,
    parts: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
    iterations: int,
    act_group: int | None,
) -> tuple[Tensor, HcIn]:
    """`hc_turn_torch` in two kernels for a few rows, in more where there are more."""
    mixed, sums = _mixed(streams, (parts, post, comb), fn)
    opened = _opened(
        mixed,
        sums,
        base,
        norm,
        carried,
        eps=eps,
        hc_eps=hc_eps,
        iterations=iterations,
        act_group=act_group,
    )
    return mixed, opened


def hc_head_triton(
    streams: Tensor,
    fn: Tensor | None,
    base: Tensor | None,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
) -> Tensor:
    """`hc_head_torch` in two kernels, one where the weights are carried."""
    _check_head(fn, base, carried)
    if carried is None:
        _, sums = _mixed(streams, None, fn)
    else:
        sums = carried[:, None]
    return _opened(
        streams,
        sums,
        base,
        norm,
        carried,
        eps=eps,
        hc_eps=hc_eps,
        iterations=0,
        act_group=None,
    ).x
