"""Experts for many rows: grouped products at tensor-core rate (twin: engine.kernels.moe.moe_torch).

One launch each for W13 and W2 of the routed experts; the shared one is a plain product
(engine.kernels.moe_shared). A program takes one tile of pairs and two blocks of weight rows: gate
and up rows of the same hidden values, or neighbouring output rows. Weights are the left operand
(A), dequantised in registers on their way to the tensor cores; rows of x are gathered into shared
memory. FP4 weights meet rows whose columns are in the order of engine.kernels.weave.

Any storage and any floating type of x goes through here; it is also the way of few rows where
`engine.kernels.moe_decode` does not apply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.fp4 import PAIR_SCALE, code_in_row, codes_of_row, pair_values, scale_place
from engine.kernels.grouping import SHORT_TILE, tile_pairs
from engine.kernels.moe_shared import shared_expert
from engine.kernels.roundtrip import fp8_device
from engine.kernels.router import Routing, parts_dtype
from engine.kernels.swiglu import swiglu
from engine.kernels.triton_compat import INTERPRETED, cast, dot, tl, triton
from engine.kernels.weave import (
    CHUNK,
    weave_device,
    weave_triton,
    woven_rows,
    woven_weights,
)

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Sign, exponent and mantissa of codes, moved to where bfloat16 has them, times a factor; see
#: engine.kernels.stream and engine.kernels.fp4 for why that is the value. Four bytes in; two numbers
#: in each register out.
_FP4_ASM = tl.constexpr(
    "{ .reg .b32 a, b, c;"
    " shl.b32 a, $4, 6; and.b32 a, a, 0x81C081C0;"
    " shl.b32 b, $4, 2; and.b32 b, b, 0x81C081C0;"
    " prmt.b32 c, a, b, 0x5410; mul.rn.bf16x2 $0, c, $5;"
    " prmt.b32 c, a, b, 0x7632; mul.rn.bf16x2 $2, c, $5;"
    " shf.r.wrap.b32 a, $4, $4, 4; and.b32 a, a, 0x81C081C0;"
    " and.b32 b, $4, 0x81808180; shr.u32 c, $4, 8; lop3.b32 b, c, 0x00400040, b, 0xEA;"
    " prmt.b32 c, a, b, 0x5410; mul.rn.bf16x2 $1, c, $6;"
    " prmt.b32 c, a, b, 0x7632; mul.rn.bf16x2 $3, c, $6; }"
)
_FP8_ASM = tl.constexpr(
    "{ .reg .b32 t, a;"
    " prmt.b32 t, $2, 0, 0x1404; shr.u32 a, t, 4; and.b32 a, a, 0x07F007F0;"
    " lop3.b32 a, t, 0x80008000, a, 0xEA; mul.rn.bf16x2 $0, a, $3;"
    " prmt.b32 t, $2, 0, 0x3424; shr.u32 a, t, 4; and.b32 a, a, 0x07F007F0;"
    " lop3.b32 a, t, 0x80008000, a, 0xEA; mul.rn.bf16x2 $1, a, $4; }"
)


@triton.jit
def _power(scale, BIAS: tl.constexpr):
    """2 ** (byte - 127 + BIAS), float32 of int32."""
    return ((scale + BIAS) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code):
    """Value of a code, float32."""
    magnitude = code & 127
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code & 128 != 0, -value, value)


@triton.jit
def _spread(scale, TIMES: tl.constexpr):
    """Repeat each column of [M, G] TIMES times."""
    M: tl.constexpr = scale.shape[0]
    G: tl.constexpr = scale.shape[1]
    wide = tl.broadcast_to(scale[:, :, None], (M, G, TIMES))
    return tl.reshape(wide, (M, G * TIMES))


@triton.jit
def _unpack(data, scale, DTYPE: tl.constexpr, FP4: tl.constexpr):
    """Dequantise a tile of codes [M, N] uint8 with int32 scale bytes; FP4: low and high halves.

    bfloat16 comes out times 2**-16, which keeps the factors finite.
    """
    narrow: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    if narrow and not _INTERPRETED:
        factor = ((scale.to(tl.int16) + (110 if FP4 else 104)) << 7).to(tl.bfloat16, bitcast=True)
        if FP4:
            low, high = tl.inline_asm_elementwise(
                _FP4_ASM, "=&r,=&r,=&r,=&r,r,r,r", [data, factor],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low = tl.inline_asm_elementwise(
                _FP8_ASM, "=&r,=&r,r,r,r", [data, factor], dtype=tl.bfloat16, is_pure=True, pack=4
            )
            high = low
    else:
        shift: tl.constexpr = -16 if narrow else 0
        if FP4:
            low, high = pair_values(data)
            factor = _power(scale, shift)
            low = low * PAIR_SCALE * factor  # in two steps: one factor might not be finite
            high = high * PAIR_SCALE * factor
        else:
            low = _e4m3(data.to(tl.int32)) * _power(scale, shift)
            high = low
    return low, high


@triton.jit
def _scales(scale, rows, step, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
            KIND: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Scale bytes of rows [M] at the BK columns of a step, int32: [M, BK / BLOCK], at least 1."""
    grain: tl.constexpr = BLOCK if BLOCK < BK else BK  # columns that share a scale here
    tall: tl.constexpr = 1 if KIND == "fp4" else BLOCK  # rows that do
    groups: tl.constexpr = (K + BLOCK - 1) // BLOCK
    column = tl.arange(0, BK // grain)[None, :]
    first = step * BK // BLOCK
    STRIPES: tl.constexpr = KIND == "fp4" and N % 8 == 0 and K % 128 == 0
    if EVEN:
        # As words: narrower loads would not come through the pipeline, but be waited for.
        at = scale_place(rows, first, K, STRIPES) if STRIPES else rows // tall * groups + first
        word = tl.load(scale.to(tl.pointer_type(tl.int32)) + (at >> 2))
        values = (word[:, None] >> (((at & 3)[:, None] + column) << 3)) & 0xFF
    else:
        if STRIPES:
            at = scale_place(rows[:, None], first + column, K, STRIPES)
        else:
            at = rows[:, None] // tall * groups + first + column
        mask = (rows < N)[:, None] & (first + column < groups)
        values = tl.load(scale + at, mask=mask, other=127).to(tl.int32)
    return values


@triton.jit
def _weights(data, scale, rows, step, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
             KIND: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
             EVEN: tl.constexpr):  # fmt: skip
    """Values of rows [M] at the BK columns of a step: [M, BK]."""
    per: tl.constexpr = 2 if KIND == "fp4" else 1  # columns of a stored element
    stored: tl.constexpr = BK // per
    column = step * stored + tl.arange(0, stored)  # no division: its alignment must be seen
    if KIND == "fp4" and N % 8 == 0 and K % 128 == 0:
        if BK % 128 == 0:  # whole runs
            within = step * (BK * 4) + code_in_row(tl.arange(0, stored), True)
        else:
            within = code_in_row(column, True)
        at = data + codes_of_row(rows, K, True)[:, None] + within[None, :]
    else:
        at = data + rows[:, None] * (K // per) + column[None, :]
    valid = (rows < N)[:, None]
    codes = tl.load(at) if EVEN else tl.load(at, mask=valid & (column < K // per)[None, :], other=0)
    if KIND == "plain":
        values = codes
    else:
        scales = _scales(scale, rows, step, N, K, BK, KIND, BLOCK, EVEN)
        grain: tl.constexpr = BLOCK if BLOCK < BK else BK
        values, high = _unpack(codes, _spread(scales, grain // per), DTYPE, KIND == "fp4")
        if KIND == "fp4":
            values = tl.reshape(tl.join(values, high), (rows.shape[0], BK))
    return values


@triton.jit
def _sums(data, scale, x, rows, source, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
          WOVEN: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """Products of weight rows [M] with rows of x [BN]: float32 [M, BN]."""
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((rows.shape[0], BN), tl.float32)
    x_rows = x + source[None, :].to(tl.int64) * K
    for step in range((K + BK - 1) // BK):
        if WOVEN:
            within = step * (BK * 4) + code_in_row(tl.arange(0, BK // 2), True)
            codes = tl.load(data + codes_of_row(rows, K, True)[:, None] + within[None, :])
            scales = _scales(scale, rows, step, N, K, BK, KIND, BLOCK, EVEN)
            values = tl.load(x_rows + (step * BK + tl.arange(0, BK))[:, None])
            weights = woven_weights(codes, scales, WARPS)
        else:
            column = step * BK + tl.arange(0, BK)
            at = x_rows + column[:, None]
            values = tl.load(at) if EVEN else tl.load(at, mask=(column < K)[:, None], other=0.0)
            weights = _weights(data, scale, rows, step, N, K, BK, KIND, BLOCK, dtype, EVEN)
        sums = dot(weights.to(dtype), values, sums)
    if KIND != "plain" and dtype == tl.bfloat16:
        sums *= 65536.0
    return sums


@triton.jit
def _tile(data, scale, x, out, order, weights, first, count, block, limit,
          CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
          SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          KIND: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, EVEN: tl.constexpr,
          WOVEN: tl.constexpr, WEAVE: tl.constexpr,
          WARPS: tl.constexpr):  # fmt: skip
    """One tile of up to BN pairs, two blocks of BM weight rows."""
    n = tl.arange(0, BN)
    valid = n < count
    place = first + tl.minimum(n, count - 1)  # columns beyond repeat the last and are not stored
    pair = tl.load(order + place)
    source = place if SECOND else pair // CHOICES
    target = pair + pair // CHOICES if SECOND else place
    m = woven_rows(2 * BM, WARPS) if WOVEN else tl.arange(0, 2 * BM)
    column = block * (2 * BM if SECOND else BM)
    rows = column + (m if SECOND else m % BM + m // BM * (N // 2))
    sums = _sums(data, scale, x, rows, source, N, K, BN, BK, KIND, BLOCK, EVEN, WOVEN,
                 WARPS)  # fmt: skip
    if SECOND:
        value = tl.trans(sums)
    else:
        halves = tl.permute(tl.reshape(sums, (2, BM, BN)), (1, 2, 0))
        gate, up = tl.split(halves)
        hidden = swiglu(gate, up, limit) * tl.load(weights + pair)[None, :]
        value = tl.trans(hidden)
        if ROUND > 0:
            # In x's dtype first, as it would be stored.
            inside = (column + tl.arange(0, BM) < N // 2)[None, :]
            value = cast(tl.where(inside, value, 0.0), out.dtype.element_ty).to(tl.float32)
            value = fp8_device(value, ROUND, 0)
        if WEAVE:
            value = weave_device(value)
    column = column + tl.arange(0, value.shape[1])[None, :]
    at = out + target.to(tl.int64)[:, None] * WIDTH + column
    tl.store(at, cast(value, out.dtype.element_ty), mask=valid[:, None] & (column < WIDTH))


@triton.jit
def _grouped_kernel(data, scale, data_apart, scale_apart, x, out, order, tiles, weights,
                    limit, CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                    WIDTH: tl.constexpr, SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
                    EVEN: tl.constexpr, WOVEN: tl.constexpr, WEAVE: tl.constexpr,
                    WARPS: tl.constexpr):  # fmt: skip
    blocks: tl.constexpr = (N + 2 * BM - 1) // (2 * BM)
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    # All at once: nothing else of a program runs before they are there.
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    if count > 0:  # a tile in use
        data += expert * data_apart
        scale += expert * scale_apart
        # An expert's last tile is often short.
        if BN > 64 and count <= BN // 4:
            _tile(data, scale, x, out, order, weights, first, count, block, limit, CHOICES, N, K,
                  WIDTH, SECOND, BM, BN // 4, BK, KIND, BLOCK, ROUND, EVEN, WOVEN, WEAVE,
                  WARPS)  # fmt: skip
        elif BN > 32 and count <= BN // 2:
            _tile(data, scale, x, out, order, weights, first, count, block, limit, CHOICES, N, K,
                  WIDTH, SECOND, BM, BN // 2, BK, KIND, BLOCK, ROUND, EVEN, WOVEN, WEAVE,
                  WARPS)  # fmt: skip
        else:
            _tile(data, scale, x, out, order, weights, first, count, block, limit, CHOICES, N, K,
                  WIDTH, SECOND, BM, BN, BK, KIND, BLOCK, ROUND, EVEN, WOVEN, WEAVE,
                  WARPS)  # fmt: skip


# ---------------------------------------------------------------- launches


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut.

    Args:
        block: weight rows of each of a program's two blocks.
        columns: per step.
        warps: of a program.
        stages: of the pipeline.
        registers: most of a thread, None for no bound.
    """

    block: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


#: FP4 weights and few pairs: bound by the reading of weights, two programs a multiprocessor.
SHORT_FP4 = Tiling(128, CHUNK, 8, 3, 128)
#: FP4 weights and many pairs.
LONG_FP4 = Tiling(128, CHUNK, 8, 3)
#: Other weights.
OTHER = Tiling(128, 64, 8, 4)


def _tiling(x: Tensor, act_group: int | None, woven: bool, pairs: int) -> Tiling:
    """For rows x, hidden values rounded in groups, one of the operands woven, pairs of a tile."""
    least = act_group or 16  # a group is rounded within a block
    like = SHORT_FP4 if pairs <= SHORT_TILE else LONG_FP4
    if INTERPRETED:
        wide = CHUNK if woven else 32
        return Tiling(max(wide, least), wide, 4, 1)
    if x.dtype != torch.bfloat16:  # exact products on the plain cores: for tests
        return Tiling(max(32, least), 32, 8, 1)
    return like if woven else OTHER


def _is_even(w: Matrix) -> bool:
    """Whether nothing of a matrix is beyond its edge, and scales can be read four at a time."""
    whole = w.scale is None or (w.scale.data_ptr() % 4 == 0 and w.scale.stride(0) % 4 == 0)
    n, k = w.shape[-2:]
    return whole and n % 256 == 0 and k % 128 == 0


def _takes_woven(x: Tensor, w: Matrix) -> bool:
    """Whether rows that meet w come in the order of engine.kernels.weave."""
    return x.dtype == torch.bfloat16 and w.kind == "fp4" and _is_even(w)


def _product(
    source: Tensor,
    out: Tensor,
    w: Matrix,
    routing: Routing,
    *,
    limit: float,
    act_group: int | None,
    second: bool,
    weave: bool,
) -> None:
    """One launch: source [.., K] into out [.., WIDTH], woven if `weave`."""
    rows, choices = routing.experts.shape
    n, k = w.shape[-2:]
    woven = _takes_woven(source, w)
    bn = max(16, tile_pairs(rows))
    cut = _tiling(source, None if second else act_group, woven or weave, bn)
    blocks = triton.cdiv(n, 2 * cut.block)
    bound = {} if cut.registers is None else {"maxnreg": cut.registers}
    data = w.data if w.kind == "plain" else w.data.view(torch.uint8)
    scale = data if w.scale is None else w.scale
    _grouped_kernel[(len(routing.tiles) * blocks,)](
        data,
        scale,
        data.stride(0),
        scale.stride(0),
        source,
        out,
        routing.order,
        routing.tiles,
        routing.weights,
        limit,
        CHOICES=choices,
        N=n,
        K=k,
        WIDTH=out.shape[-1],
        SECOND=second,
        BM=cut.block,
        BN=bn,
        BK=cut.columns,
        KIND=w.kind,
        BLOCK=w.block,
        ROUND=0 if second else act_group or 0,
        EVEN=_is_even(w) and n % (2 * cut.block) == 0,
        WOVEN=woven,
        WEAVE=weave,
        WARPS=cut.warps,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **bound,
    )


def grouped_experts(
    x: Tensor,
    routing: Routing,
    w13: Matrix,
    w2: Matrix,
    shared13: Matrix | None,
    shared2: Matrix | None,
    *,
    limit: float,
    act_group: int | None,
) -> Tensor:
    """Run the experts for any number of rows; arguments and result as `moe_torch`."""
    rows, choices = routing.experts.shape
    d, inner = w2.shape[-2:]
    x = x.contiguous()
    hidden = torch.empty(rows * choices, inner, dtype=x.dtype, device=x.device)
    # What nobody writes is 0; the shared expert sees to that where there is one.
    new = torch.zeros if shared2 is None else torch.empty
    parts = new((rows, choices + 1, d), dtype=parts_dtype(x), device=x.device)
    if shared13 is not None and shared2 is not None:
        shared_expert(x, routing.experts, shared13, shared2, parts, limit=limit,
                      act_group=act_group)  # fmt: skip
    source = weave_triton(x) if _takes_woven(x, w13) else x
    weave = _takes_woven(hidden, w2)
    for start, out, w, second in ((source, hidden, w13, False), (hidden, parts, w2, True)):
        _product(
            start,
            out,
            w,
            routing,
            limit=limit,
            act_group=act_group,
            second=second,
            weave=weave and not second,
        )
    return parts
