"""Experts for a few rows by FP8 tensor cores: codes meet codes, nothing is widened.

A tile is up to eight pairs of one expert. Rows of x, rounded to FP8 already, are split back into
e4m3 codes and power-of-two scales, which is exact. An e2m1 code becomes the e4m3 code of 2**-6 of
its value by moving bits, its subnormal included. So the weights are the left operand of an FP8
product as they are stored, and scales are applied to partial sums in float32 (twin:
engine.kernels.moe.moe_torch).

Packed FP4 has even columns in low nibbles, odd ones in high nibbles, and a scale per 32 columns. A
*chunk* is 64 columns, 32 bytes of a weight row: bytes 0 .. 15 are its first group, 16 .. 31 its
second. The right operand has 16 columns for a chunk: the eight rows of x with the second group
zeroed, then with the first group zeroed, so that one product gives both groups' sums apart. Plain weights need none of this and take a kernel
of their own.

Four launches: codes of x, W13, codes of hidden, W2. Programs are small and several share a
multiprocessor, which hides the latency of their loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import Matrix
from engine.kernels.roundtrip import fp8_scale_device
from engine.kernels.router import DECODE_TILE, Routing
from engine.kernels.triton_compat import INTERPRETED, cast, dot, tl, triton

_PLAIN = tl.constexpr(INTERPRETED)
#: Undoes the e4m3 codes' 2**-6 of e2m1 values.
_CODE_SCALE = tl.constexpr(64.0)

_NIBBLES = tl.constexpr(
    """{
    .reg .b32 t, s;
    shl.b32 t, $2, 2;
    and.b32 t, t, 0x1C1C1C1C;
    shl.b32 s, $2, 4;
    and.b32 s, s, 0x80808080;
    or.b32 $0, t, s;
    shr.u32 t, $2, 2;
    and.b32 t, t, 0x1C1C1C1C;
    and.b32 s, $2, 0x80808080;
    or.b32 $1, t, s;
}"""
)


@triton.jit
def _codes_of_nibbles(w):
    """Low and high nibbles of bytes as e4m3 codes, uint8."""
    if _PLAIN:
        low = ((w & 7) << 2) | ((w & 8) << 4)
        high = ((w >> 2) & 0x1C) | (w & 0x80)
    else:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,r", [w], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _value(code):
    """Float32 values of e4m3 codes, by arithmetic."""
    wide = code.to(tl.int32)
    exponent, mantissa = (wide >> 3) & 15, (wide & 7).to(tl.float32)
    normal = (mantissa + 8.0) * tl.exp2((exponent - 10).to(tl.float32))
    magnitude = tl.where(exponent == 0, mantissa * 0.001953125, normal)
    return tl.where(wide >= 128, -magnitude, magnitude)


@triton.jit
def _dot(a, b, acc):
    """Add a @ b of e4m3 codes (uint8) to float32 acc."""
    if _PLAIN:
        return tl.dot(_value(a), _value(b), acc, input_precision="ieee")
    a8 = a.to(tl.float8e4nv, bitcast=True)
    b8 = b.to(tl.float8e4nv, bitcast=True)
    return tl.dot(a8, b8, acc)


@triton.jit
def _code(value):
    """Give e4m3 codes of float32 values that are exact in e4m3."""
    if _PLAIN:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = tl.abs(value)
        normal = ((bits >> 20) & 0x7FF) - (120 << 3)  # exponent and the mantissa's first three bits
        small = (magnitude * 512.0).to(tl.int32)
        code = tl.where(magnitude < 0.015625, small, normal) | tl.where(bits < 0, 128, 0)
        return code.to(tl.uint8)
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _power(byte):
    """2 ** (byte - 127) of scale bytes."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["T", "routed"])  # one kernel for all batches
def _encode_kernel(
    x, order, tiles, num_tiles, pairs, scales, shared, shared_scales, stride, T, routed,
    CHOICES: tl.constexpr, SECOND: tl.constexpr, FP4: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program (128 columns, tile): codes and scales of eight rows; shared tiles come last."""
    block, tile = tl.program_id(0), tl.program_id(1)
    r, j = tl.arange(0, 8), tl.arange(0, 128)
    column = block * 128 + j
    inside = (column < K)[None, :]
    is_shared = tile >= routed
    if is_shared:
        first = (tile - routed) * 8
        count = tl.minimum(T - first, 8)
        source = first + tl.minimum(r, count - 1) + (T * CHOICES if SECOND else 0)
    else:
        if tile >= tl.load(num_tiles):
            return
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        place = first + tl.minimum(r, count - 1)
        source = place if SECOND else tl.load(order + place) // CHOICES
    at = source.to(tl.int64)[:, None] * stride + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    grouped = tl.reshape(tl.abs(value), (8, 128 // GROUP, GROUP))
    amax = tl.maximum(tl.max(grouped, 2), 1e-4)
    scale = fp8_scale_device(amax)
    spread = tl.reshape(tl.broadcast_to(scale[:, :, None], (8, 128 // GROUP, GROUP)), (8, 128))
    quotient = value / spread
    # What was not rounded before is rounded here, by the hardware's conversion.
    code = _code(_rounded(quotient))
    g = tl.arange(0, 128 // GROUP)
    if is_shared or not FP4:
        base = (shared if is_shared else pairs) + (tile - routed if is_shared else tile).to(tl.int64) * (16 * K)
        to = base + (column // GROUP)[None, :] * (16 * GROUP) + r[:, None] * GROUP + (column % GROUP)[None, :]
        tl.store(to, code, mask=inside)
        tl.store(to + 8 * GROUP, tl.zeros((8, 128), tl.uint8), mask=inside)
        own = (shared_scales if is_shared else scales) + (tile - routed if is_shared else tile) * (16 * (K // GROUP))
        number = block * (128 // GROUP) + g
        to_scale = own + number[None, :] * 16 + r[:, None]
        real = (number < K // GROUP)[None, :]
        tl.store(to_scale, scale, mask=real)
        tl.store(to_scale + 8, scale, mask=real)
    else:
        chunk, within = column // 64, column % 64
        half, byte, parity = within // 32, within // 2, within % 2
        home = pairs + tile.to(tl.int64) * (32 * K // 2 * 2)
        at_code = home + ((chunk * 2 + parity) * 512 + byte)[None, :]
        tl.store(at_code + ((half * 8)[None, :] + r[:, None]) * 32, code, mask=inside)
        zero = tl.zeros((8, 128), tl.uint8)
        tl.store(at_code + ((8 - half * 8)[None, :] + r[:, None]) * 32, zero, mask=inside)
        # Columns 0 .. 7 of a chunk take the first group's scale, 8 .. 15 the second's.
        n = tl.arange(0, 4)
        group_of = (n * 32) // GROUP
        picked = tl.sum(tl.where(g[None, None, :] == group_of[None, :, None], scale[:, None, :], 0.0), 2)
        piece = block * 4 + n
        scale_at = scales + tile * (K // 4) + (piece // 2 * 16 + piece % 2 * 8)[None, :] + r[:, None]
        tl.store(scale_at, picked, mask=(piece < K // 32)[None, :])


@triton.jit
def _rounded(value):
    """Round to e4m3 values where needed; exact ones stay."""
    magnitude = tl.abs(value)
    bits = magnitude.to(tl.int32, bitcast=True)
    binade = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(binade, 0.015625) * 0.125
    # Adding and taking away 1.5 * 2**23 steps rounds to the nearest, ties to even.
    magic = step * 12582912.0
    rounded = (magnitude + magic) - magic
    rounded = tl.minimum(rounded, 448.0)
    return tl.where(value < 0, -rounded, rounded)


@triton.jit
def _finish(acc, out, target, weight, column, count, limit, SECOND: tl.constexpr, BN: tl.constexpr):
    """Add the two halves of the columns up and store what became of the tile's rows."""
    r = tl.arange(0, 8)
    total = tl.sum(tl.reshape(acc, (BN, 2, 8)), 1)
    real = (r < count)[None, :]
    if SECOND:
        tl.store(out + target[None, :] + column[:, None], total, mask=real)
    else:
        both = tl.permute(tl.reshape(total, (BN // 2, 2, 8)), (0, 2, 1))
        gate, up = tl.split(both)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        hidden = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
        tl.store(out + target[None, :] + column[:, None], cast(hidden, out.dtype.element_ty), mask=real)


@triton.jit
def _chunk(acc, w_at, x_at, word, xs, BN: tl.constexpr):
    """Add 64 columns of FP4 weights; `word` has the scales of their two groups in its low bytes."""
    low, high = _codes_of_nibbles(tl.load(w_at))
    part = _dot(low, tl.load(x_at), tl.zeros((BN, 16), tl.float32))
    part = _dot(high, tl.load(x_at + 512), part)
    first = (tl.arange(0, 16) < 8)[None, :]
    low_scale, high_scale = _power(word & 255)[:, None], _power((word >> 8) & 255)[:, None]
    return acc + part * (tl.where(first, low_scale, high_scale) * xs[None, :])


@triton.jit(do_not_specialize=["T", "routed"])  # one kernel for all batches
def _product_kernel(
    data, scale, data_apart, scale_apart, shared_data, shared_scale, pairs, scales, shared,
    shared_scales, out, order, tiles, num_tiles, weights, T, routed, limit,
    CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, SECOND: tl.constexpr, FP4: tl.constexpr, BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (BN weight rows, tile)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    r, n, col = tl.arange(0, 8), tl.arange(0, BN), tl.arange(0, 16)
    is_shared = tile >= routed
    if SECOND:
        row = block * BN + n
        column = row
    else:  # gate rows at even places, their up rows at odd ones
        row = block * (BN // 2) + n // 2 + (n % 2) * (N // 2)
        column = block * (BN // 2) + tl.arange(0, BN // 2)
    acc = tl.zeros((BN, 16), tl.float32)
    weight = tl.full((8,), 1.0, tl.float32)
    if is_shared:
        first = (tile - routed) * 8
        count = tl.minimum(T - first, 8)
        index = first + tl.minimum(r, count - 1)
        target = index * (CHOICES + 1) + CHOICES if SECOND else T * CHOICES + index
        acc = _fp8_loop(
            acc, shared_data, shared_scale, shared, shared_scales, tile - routed, row, col,
            K, SHARED_BLOCK, GROUP, BN, STAGES,
        )  # fmt: skip
    else:
        if tile >= tl.load(num_tiles):
            return
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        place = first + tl.minimum(r, count - 1)
        pair = tl.load(order + place)
        target = pair + pair // CHOICES if SECOND else place
        if not SECOND:
            weight = tl.load(weights + pair)
        data += expert * data_apart
        scale += expert * scale_apart
        if FP4:
            k = tl.arange(0, 32)
            w_at = data + row[:, None] * (K // 2) + k[None, :]
            s_at = scale.to(tl.pointer_type(tl.int64)) + row * (K // 256)
            base = pairs + tile.to(tl.int64) * (32 * K // 2 * 2)
            x_at = base + col[None, :] * 32 + k[:, None]
            xs_at = scales + tile * (K // 4) + col
            # Narrow loads are not pipelined, so those of a step are made one step ahead.
            word = tl.load(s_at)
            xs0, xs1 = tl.load(xs_at), tl.load(xs_at + 16)
            xs2, xs3 = tl.load(xs_at + 32), tl.load(xs_at + 48)
            for step in tl.range(0, K // 256, num_stages=STAGES):
                following = tl.minimum(step + 1, K // 256 - 1)
                word_ahead = tl.load(s_at + following)
                xs_ahead = xs_at + following * 64
                ahead0, ahead1 = tl.load(xs_ahead), tl.load(xs_ahead + 16)
                ahead2, ahead3 = tl.load(xs_ahead + 32), tl.load(xs_ahead + 48)
                acc = _chunk(acc, w_at + step * 128, x_at + step * 4096, word, xs0, BN)
                acc = _chunk(acc, w_at + step * 128 + 32, x_at + step * 4096 + 1024, word >> 16, xs1, BN)
                acc = _chunk(acc, w_at + step * 128 + 64, x_at + step * 4096 + 2048, word >> 32, xs2, BN)
                acc = _chunk(acc, w_at + step * 128 + 96, x_at + step * 4096 + 3072, word >> 48, xs3, BN)
                word = word_ahead
                xs0, xs1, xs2, xs3 = ahead0, ahead1, ahead2, ahead3
            acc = acc * _CODE_SCALE
        else:
            acc = _fp8_loop(
                acc, data, scale, pairs, scales, tile, row, col, K, BLOCK, GROUP, BN, STAGES
            )
    if SECOND:
        _finish(acc, out, target.to(tl.int64) * WIDTH, weight, column, count, limit, SECOND, BN)
    else:
        _finish(acc, out, target.to(tl.int64) * WIDTH, weight, column, count, limit, SECOND, BN)


@triton.jit
def _fp8_loop(
    acc, data, scale, codes, scales, tile, row, col, K: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over columns of FP8 weights in square blocks; a block is as wide as a group of x."""
    k = tl.arange(0, GROUP)
    w_at = data + row[:, None] * K + k[None, :]
    s_at = scale + row // BLOCK * ((K + BLOCK - 1) // BLOCK)
    x_at = codes + tile.to(tl.int64) * (16 * K) + col[None, :] * GROUP + k[:, None]
    xs_at = scales + tile * (16 * (K // GROUP)) + col
    byte, xs = tl.load(s_at), tl.load(xs_at)
    for group in tl.range(0, K // GROUP, num_stages=STAGES):
        following = tl.minimum(group + 1, K // GROUP - 1)
        byte_ahead = tl.load(s_at + following * GROUP // BLOCK)
        xs_ahead = tl.load(xs_at + following * 16)
        w = tl.load(w_at + group * GROUP)
        x = tl.load(x_at + group * (16 * GROUP))
        part = _dot(w, x, tl.zeros((BN, 16), tl.float32))
        acc += part * (_power(byte)[:, None] * xs[None, :])
        byte, xs = byte_ahead, xs_ahead
    return acc


@triton.jit(do_not_specialize=["T", "routed"])
def _plain_kernel(
    data, data_apart, shared_data, x, stride, out, order, tiles, num_tiles, weights, T, routed,
    limit, CHOICES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    SECOND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (BN weight rows, tile), for weights that are as wide as x."""
    block, tile = tl.program_id(0), tl.program_id(1)
    r, n, col, k = tl.arange(0, 8), tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BK)
    is_shared = tile >= routed
    if SECOND:
        row = block * BN + n
        column = row
    else:
        row = block * (BN // 2) + n // 2 + (n % 2) * (N // 2)
        column = block * (BN // 2) + tl.arange(0, BN // 2)
    if is_shared:
        first = (tile - routed) * 8
        count = tl.minimum(T - first, 8)
        index = first + tl.minimum(r, count - 1)
        target = index * (CHOICES + 1) + CHOICES if SECOND else T * CHOICES + index
        source = first + tl.minimum(col % 8, count - 1) + (T * CHOICES if SECOND else 0)
        weight = tl.full((8,), 1.0, tl.float32)
        w_at = shared_data + row[:, None] * K + k[None, :]
    else:
        if tile >= tl.load(num_tiles):
            return
        expert = tl.load(tiles + tile * 3).to(tl.int64)
        first = tl.load(tiles + tile * 3 + 1)
        count = tl.load(tiles + tile * 3 + 2)
        pair = tl.load(order + first + tl.minimum(r, count - 1))
        target = pair + pair // CHOICES if SECOND else first + tl.minimum(r, count - 1)
        weight = tl.load(weights + pair)
        place = first + tl.minimum(col % 8, count - 1)
        source = place if SECOND else tl.load(order + place) // CHOICES
        w_at = data + expert * data_apart + row[:, None] * K + k[None, :]
    x_at = x + source.to(tl.int64)[None, :] * stride + k[:, None]
    own = (col < 8)[None, :]
    acc = tl.zeros((BN, 16), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        inside = k0 + k < K
        w = tl.load(w_at + k0, mask=inside[None, :], other=0.0)
        value = tl.load(x_at + k0, mask=own & inside[:, None], other=0.0)
        acc = dot(w.to(value.dtype), value, acc)
    _finish(acc, out, target.to(tl.int64) * WIDTH, weight, column, count, limit, SECOND, BN)


# ---------------------------------------------------------------- launches


def can_tile(x: Tensor, act_group: int | None, *weights: Matrix) -> bool:
    """Whether `tile_experts` takes these operands."""
    if all(w.kind == "plain" and w.shape[-2] % 64 == 0 for w in weights):
        return act_group is None and all(w.data.dtype == x.dtype for w in weights)
    return (
        x.dtype == torch.bfloat16
        and act_group is not None
        and all(
            w.kind in ("fp4", "fp8")
            and w.shape[-1] % (256 if w.kind == "fp4" else 128) == 0
            and w.shape[-2] % 128 == 0
            and (w.kind == "fp4" or w.block % act_group == 0)
            and w.scale is not None
            and w.scale.data_ptr() % 8 == 0
            and (w.scale.dim() == 2 or w.scale.stride(0) % 8 == 0)
            for w in weights
        )
    )


@dataclass(frozen=True, slots=True)
class TileCut:
    """How a product is cut: weight rows of a program, its warps, loads ahead."""

    rows: int = 128
    warps: int = 4
    stages: int = 4


def _cut(pairs: int) -> TileCut:
    """Few pairs make few programs: smaller ones then."""
    return TileCut(64, 4, 4) if pairs <= 12 else TileCut(128, 4, 4)


@dataclass(frozen=True, slots=True)
class _Codes:
    """Codes and scales of the rows a product reads."""

    pairs: Tensor
    scales: Tensor
    shared: Tensor
    shared_scales: Tensor


def _encode(
    source: Tensor, routing: Routing, shared_tiles: int, *, group: int, fp4: bool, second: bool
) -> _Codes:
    rows, choices = routing.experts.shape
    width = source.shape[1]
    count = len(routing.tiles)
    new = source.new_empty
    codes = _Codes(
        new((count, (32 if fp4 else 16) * width), dtype=torch.uint8),
        new((count, width // 4 if fp4 else 16 * (width // group)), dtype=torch.float32),
        new((max(shared_tiles, 1), 16 * width), dtype=torch.uint8),
        new((max(shared_tiles, 1), 16 * (width // group)), dtype=torch.float32),
    )
    _encode_kernel[(triton.cdiv(width, 128), count + shared_tiles)](
        source, routing.order, routing.tiles, routing.num_tiles, codes.pairs, codes.scales,
        codes.shared, codes.shared_scales, source.stride(0), rows, count, CHOICES=choices,
        SECOND=second, FP4=fp4, GROUP=group, K=width, num_warps=2,
    )  # fmt: skip
    return codes


def _product(
    source: Tensor,
    out: Tensor,
    w: Matrix,
    shared: Matrix | None,
    routing: Routing,
    cut: TileCut,
    *,
    limit: float,
    group: int | None,
    second: bool,
) -> None:
    rows, choices = routing.experts.shape
    height, width = w.shape[-2:]
    shared_tiles = 0 if shared is None else triton.cdiv(rows, DECODE_TILE)
    if w.kind == "plain":
        other = w[0] if shared is None else shared
        _plain_kernel[(triton.cdiv(height, 64), len(routing.tiles) + shared_tiles)](
            w.data, w.data.stride(0), other.data, source, source.stride(0), out, routing.order,
            routing.tiles, routing.num_tiles, routing.weights, rows, len(routing.tiles), limit,
            CHOICES=choices, N=height, K=width, WIDTH=out.shape[-1], SECOND=second, BN=64,
            BK=64 if w.data.dtype == torch.float32 else 128, STAGES=cut.stages, num_warps=4,
        )  # fmt: skip
        return
    assert group is not None
    codes = _encode(
        source, routing, shared_tiles, group=group, fp4=w.kind == "fp4", second=second
    )
    other = w[0] if shared is None else shared
    assert w.scale is not None
    assert other.scale is not None
    grid = (triton.cdiv(height, cut.rows), len(routing.tiles) + shared_tiles)
    _product_kernel[grid](
        w.data.view(torch.uint8), w.scale, w.data.stride(0), w.scale.stride(0),
        other.data.view(torch.uint8), other.scale, codes.pairs, codes.scales, codes.shared,
        codes.shared_scales, out, routing.order, routing.tiles, routing.num_tiles,
        routing.weights, rows, len(routing.tiles), limit, CHOICES=choices, N=height,
        K=width, WIDTH=out.shape[-1], SECOND=second, FP4=w.kind == "fp4", BLOCK=w.block,
        SHARED_BLOCK=other.block, GROUP=group, BN=cut.rows, STAGES=cut.stages,
        num_warps=cut.warps,
    )  # fmt: skip


def tile_experts(
    x: Tensor,
    routing: Routing,
    w13: Matrix,
    w2: Matrix,
    shared13: Matrix | None,
    shared2: Matrix | None,
    *,
    limit: float,
    act_group: int | None,
    cuts: tuple[TileCut, TileCut] | None = None,
) -> Tensor:
    """Run the experts for up to DECODE_ROWS rows; arguments and result as `moe_torch`.

    `cuts` are those of the two products, for measurements; chosen by shape otherwise.
    """
    rows, choices = routing.experts.shape
    d, inner = w2.shape[-2:]
    first, second = cuts or (_cut(rows * choices),) * 2
    hidden = torch.empty(rows * (choices + 1), inner, dtype=x.dtype, device=x.device)
    parts = torch.zeros((rows, choices + 1, d), dtype=torch.float32, device=x.device)
    _product(x, hidden, w13, shared13, routing, first, limit=limit, group=act_group, second=False)
    _product(hidden, parts, w2, shared2, routing, second, limit=limit, group=act_group, second=True)
    return parts
