"""Products with packed weights: y = x @ W^T for one row of a sequence or a whole prompt.

T rows of width K meet W [N, K] in any storage of `Matrix`. Sums are in float32; the operands of a
product are x as it is (or rounded to FP8 in groups, `act_group`, model.md 2.1) and W's exact
values. Few rows are bound by the reading of weights, many by arithmetic, and take other kernels
(engine.kernels.gemv, engine.kernels.gemm); which is decided by the host's shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.formats import Matrix, dequantise
from engine.kernels.reference import rms_norm
from engine.kernels.roundtrip import round_trip_fp8


def _rounded(x: Tensor, act_group: int | None) -> Tensor:
    return x if act_group is None else round_trip_fp8(x, act_group)


def _product(x: Tensor, w: Matrix, out_dtype: torch.dtype | None) -> Tensor:
    """Give x @ W^T in x's dtype, or in float32 where more than x's precision is asked for."""
    out = out_dtype or x.dtype
    work = torch.promote_types(x.dtype, out)
    return F.linear(x.to(work), dequantise(w, work)).to(out)


def linear_torch(
    x: Tensor, w: Matrix, *, act_group: int | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """One product.

    Args:
        x: [T, K], rows may lie apart (a slice of columns of a wider tensor).
        w: [N, K].
        act_group: group of x's FP8 rounding, None for none.
        out_dtype: of the result; x's by default.

    Returns:
        [T, N], contiguous.
    """
    return _product(_rounded(x, act_group), w, out_dtype)


def linears_torch(
    xs: Sequence[Tensor],
    ws: Sequence[Matrix],
    *,
    out_dtypes: Sequence[torch.dtype | None] | None = None,
) -> tuple[Tensor, ...]:
    """Products that do not wait for each other, in as few launches as their storage allows.

    Args:
        xs: one [T, K] per product, not rounded here; often the same tensor twice.
        ws: one [N_i, K_i] per product.
        out_dtypes: of the results; None (for all or one) for x's.

    Returns:
        [T, N_i] each.
    """
    kinds = out_dtypes or [None] * len(xs)
    return tuple(_product(x, w, kind) for x, w, kind in zip(xs, ws, kinds, strict=True))


def norm_linear_torch(
    x: Tensor,
    norm: Tensor,
    eps: float,
    ws: Sequence[Matrix],
    *,
    act_group: int | None = None,
) -> tuple[Tensor, ...]:
    """Products of several weights with one normed (and rounded) input.

    Args:
        x: [T, K], rows may lie apart.
        norm: weight of the RMSNorm, float32 [K]; statistics in float32, result in x's dtype.
        eps: of the norm.
        ws: [N_i, K] each.
        act_group: group of the normed input's FP8 rounding, None for none.

    Returns:
        [T, N_i] each, in x's dtype.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    low = _rounded(rms_norm(wide, norm.to(wide.dtype), eps).to(x.dtype), act_group)
    return tuple(_product(low, w, None) for w in ws)


def grouped_linear_torch(
    o: Tensor, w: Matrix, groups: int, *, out_act_group: int | None = None
) -> Tensor:
    """Product of each group of columns with its own block of rows (wo_a, model.md 2.4 step 7).

    Args:
        o: [T, G * Kg], not rounded.
        w: [G * R, Kg]; rows g * R ... belong to group g.
        groups: G.
        out_act_group: group of the result's FP8 rounding, None for none.

    Returns:
        [T, G * R].
    """
    values = dequantise(w, o.dtype)
    by_group = o.view(len(o), groups, -1).transpose(0, 1)
    z = torch.bmm(by_group, values.view(groups, -1, values.shape[-1]).transpose(1, 2))
    return _rounded(z.transpose(0, 1).reshape(len(o), -1), out_act_group)


def linear_parts_torch(x: Tensor, w: Matrix, *, act_group: int | None = None) -> Tensor:
    """One product as summands: the caller adds them up, in order, in float32.

    Args:
        x: [T, K].
        w: [N, K].
        act_group: group of x's FP8 rounding, None for none.

    Returns:
        [T, P, N]; P and the dtype (x's or float32) are the implementation's choice.
    """
    return linear_torch(x, w, act_group=act_group)[:, None]


def attention_output_torch(
    o: Tensor, wo_a: Matrix, wo_b: Matrix, groups: int, *, act_group: int | None = None
) -> Tensor:
    """From the heads' output to the sublayer's, as summands for `hc_turn`.

    Args:
        o: [T, G * Kg], rotated back.
        wo_a: [G * R, Kg]; its input is not rounded (model.md 2.1).
        wo_b: [d, G * R]; its input is.
        groups: G.
        act_group: group of that rounding, None for none.

    Returns:
        [T, P, d] as `linear_parts`.
    """
    low = grouped_linear_torch(o, wo_a, groups, out_act_group=act_group)
    return linear_parts_torch(low, wo_b)
