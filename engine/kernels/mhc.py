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

from engine.kernels.mhc_launch import mixed, opened
from engine.kernels.reference import rms_norm
from engine.kernels.roundtrip import round_trip_fp8


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
    closing: tuple[Tensor, Tensor, Tensor] | None = None,
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
        closing: (parts, post, comb) of the last site, as in `hc_out`, where it is still open.

    Returns:
        [L, d] in the streams' dtype.

    Raises:
        ValueError: neither or both of (fn, base) and carried are given.
    """
    _check_head(fn, base, carried)
    if closing is not None:
        streams = hc_out_torch(streams, *closing)
    weights = carried
    if fn is not None and base is not None:
        weights = _mixes(streams, fn, base, eps).sigmoid() + hc_eps
    assert weights is not None
    return _normed(streams, weights, norm, eps)


# ---------------------------------------------------------------- Triton


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
    _, sums = mixed(streams, None, fn)
    made = opened(
        streams,
        sums,
        base,
        norm,
        carried,
        iterations=iterations,
        eps=eps,
        hc_eps=hc_eps,
        act_group=act_group,
    )
    return HcIn(*made)


def hc_out_triton(streams: Tensor, parts: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`hc_out_torch` in one kernel."""
    return mixed(streams, (parts, post, comb), None)[0]


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
    new, sums = mixed(streams, (parts, post, comb), fn)
    made = opened(
        new,
        sums,
        base,
        norm,
        carried,
        eps=eps,
        hc_eps=hc_eps,
        iterations=iterations,
        act_group=act_group,
    )
    return new, HcIn(*made)


def hc_head_triton(
    streams: Tensor,
    fn: Tensor | None,
    base: Tensor | None,
    norm: Tensor,
    carried: Tensor | None,
    *,
    eps: float,
    hc_eps: float,
    closing: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """`hc_head_torch` in two kernels; one where weights are carried and no site is closed."""
    _check_head(fn, base, carried)
    if carried is None:
        streams, sums = mixed(streams, closing, fn)
    else:
        sums = carried[:, None]
        if closing is not None:
            streams = hc_out_triton(streams, *closing)
    return opened(
        streams, sums, base, norm, carried, eps=eps, hc_eps=hc_eps, iterations=0, act_group=None
    )[0]
