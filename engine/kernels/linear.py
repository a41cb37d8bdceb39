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

from engine.kernels import codes, gemm, gemv
from engine.kernels.codes import Codes, encode_device
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.overlap import await_previous, begin_next, overlaps
from engine.kernels.reference import rms_norm
from engine.kernels.roundtrip import fp8_device, round_trip_fp8
from engine.kernels.triton_compat import cast, tl, triton

# ---------------------------------------------------------------- torch


def _rounded(x: Tensor, act_group: int | None) -> Tensor:
    return x if act_group is None else round_trip_fp8(x, act_group)


def _product(x: Tensor, w: Matrix, out_dtype: torch.dtype | None) -> Tensor:
    """Give x @ W^T in the widest dtype of x, a plain W and the result; packed W is exact in any."""
    out = out_dtype or x.dtype
    work = torch.promote_types(x.dtype, out)
    if w.kind == "plain":
        work = torch.promote_types(work, w.data.dtype)
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
    wanted: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, ...]:
    """Products of several weights with one normed (and rounded) input.

    Args:
        x: [T, K], rows may lie apart.
        norm: weight of the RMSNorm, float32 [K]; statistics in float32, result in x's dtype.
        eps: of the norm.
        ws: [N_i, K] each.
        act_group: group of the normed input's FP8 rounding, None for none.
        wanted: of the second of two weights: int32 [T], and a number. Where none of the first reaches
            the second, nobody reads that product, which is then any finite numbers.

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


# ---------------------------------------------------------------- Triton


@triton.jit
def _prepare(
    x,
    norm,
    out,
    powers,
    T,
    K,
    stride,
    eps,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm (over the whole row) and round a row of x, or round a share of it; out may be codes."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    k = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value) / K + eps) * weight
        value = cast(value, DTYPE).to(tl.float32)
    if out.dtype.element_ty == tl.float8e4nv:
        encode_device(value[None, :], out, powers, row + tl.arange(0, 1), first, T, K, GROUP)
    else:
        if GROUP > 0:
            value = tl.reshape(fp8_device(value[None, :], GROUP, 0), (BLOCK,))
        tl.store(out + row * K + k, cast(value, DTYPE), mask=k < K)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _run_prepare(
    x: Tensor, norm: Tensor | None, eps: float, act_group: int | None, out: Tensor, powers: Tensor
) -> None:
    rows, width = x.shape
    block = 1024 if norm is None else triton.next_power_of_2(width)
    overlap = overlaps(x.device) and rows <= gemv.OVERLAP_ROWS
    _prepare[(rows, triton.cdiv(width, block))](
        x,
        x if norm is None else norm,
        out,
        powers,
        rows,
        width,
        x.stride(0),
        eps,
        NORM=norm is not None,
        GROUP=act_group or 0,
        DTYPE=_TYPES[x.dtype],
        BLOCK=block,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4 if block <= 2048 else 8,
    )


def _prepared(x: Tensor, norm: Tensor | None, eps: float, act_group: int | None) -> Tensor:
    """RMSNorm if a weight is given, then FP8 rounding if a group is: [T, K] contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run_prepare(x, norm, eps, act_group, out, out)
    return out


def _encoded(x: Tensor, norm: Tensor | None, eps: float, group: int) -> Codes:
    """Do as `_prepared`, but leave codes."""
    made = Codes.empty(len(x), x.shape[1], group, x.device)
    _run_prepare(x, norm, eps, group, made.codes, made.powers)
    return made


def _is_small(rows: int, ws: Sequence[Matrix]) -> bool:
    return all(gemv.takes(rows, w) for w in ws)


def linear_triton(
    x: Tensor, w: Matrix, *, act_group: int | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear_torch` in kernels."""
    narrow = out_dtype in (None, x.dtype)  # a result in float32 wants sums of that precision
    if act_group is not None and narrow and codes.take(x, (w,), act_group):
        return codes.run(_encoded(x, None, 0.0, act_group), (w,), x.dtype)[0]
    if act_group is not None:
        x = _prepared(x, None, 0.0, act_group)
    return linears_triton((x,), (w,), out_dtypes=(out_dtype,))[0]


def linears_triton(
    xs: Sequence[Tensor],
    ws: Sequence[Matrix],
    *,
    out_dtypes: Sequence[torch.dtype | None] | None = None,
) -> tuple[Tensor, ...]:
    """`linears_torch` in kernels; few rows take one launch for up to four products."""
    kinds = [kind or x.dtype for kind, x in zip(out_dtypes or [None] * len(xs), xs, strict=True)]
    rows = xs[0].shape[0]
    if not _is_small(rows, ws):
        return tuple(gemm.multiply(*each) for each in zip(xs, ws, kinds, strict=True))
    outs = tuple(
        torch.empty((rows, w.shape[0]), dtype=kind, device=x.device)
        for x, w, kind in zip(xs, ws, kinds, strict=True)
    )
    gemv.run([gemv.Job(x, w, out) for x, w, out in zip(xs, ws, outs, strict=True)])
    return outs


def norm_linear_triton(
    x: Tensor,
    norm: Tensor,
    eps: float,
    ws: Sequence[Matrix],
    *,
    act_group: int | None = None,
    wanted: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, ...]:
    """`norm_linear_torch` in kernels."""
    if act_group is not None and codes.take(x, ws, act_group):
        return codes.run(_encoded(x, norm, eps, act_group), ws, x.dtype, wanted)
    low = _prepared(x, norm, eps, act_group)
    return linears_triton([low] * len(ws), ws)


def grouped_linear_triton(
    o: Tensor, w: Matrix, groups: int, *, out_act_group: int | None = None
) -> Tensor:
    """`grouped_linear_torch` in kernels."""
    if _is_small(len(o), (w,)):
        out = torch.empty((len(o), w.shape[0]), dtype=o.dtype, device=o.device)
        gemv.run([gemv.Job(o, w, out, groups, out_act_group or 0)])
        return out
    out = gemm.multiply_grouped(o, w, groups)
    return out if out_act_group is None else _prepared(out, None, 0.0, out_act_group)


def linear_parts_triton(x: Tensor, w: Matrix, *, act_group: int | None = None) -> Tensor:
    """`linear_parts_torch` in kernels; few rows leave one summand per share of K."""
    if act_group is not None:
        x = _prepared(x, None, 0.0, act_group)
    if _is_small(len(x), (w,)):
        return gemv.run_parts(x, w)
    return gemm.multiply(x, w, x.dtype)[:, None]


def attention_output_triton(
    o: Tensor, wo_a: Matrix, wo_b: Matrix, groups: int, *, act_group: int | None = None
) -> Tensor:
    """`attention_output_torch` in kernels: two launches for few rows."""
    few = _is_small(len(o), (wo_a, wo_b))
    if few and act_group is not None and codes.take(o, (wo_b,), act_group):
        made = Codes.empty(len(o), wo_a.shape[0], act_group, o.device)
        gemv.run([gemv.Job(o, wo_a, made.codes, groups, act_group, made.powers)])
        return codes.run_parts(made, wo_b)
    low = grouped_linear_triton(o, wo_a, groups, out_act_group=act_group)
    return linear_parts_triton(low, wo_b)
