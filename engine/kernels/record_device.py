"""Records on the device: what kernels store cached values by, and load tiles of them by.

The twins are pack_torch and unpack_torch (engine.kernels.records), the layout is that of
engine.plan.records.

A record is read in *pieces* of up to 64 bytes, so that a thread reads 16 bytes at a time and it is
known at compile time which scale belongs to a piece. A narrow float moved to the top of a bfloat16's
mantissa and the bottom of its exponent is its value times 2**-120 (e4m3) or 2**-126 (e2m1),
subnormals included; a product with a power of two puts that right, one with the scale follows. Both
are exact. (That e4m3's two NaN codes become numbers does no harm: their group's scale is NaN.)
"""

from __future__ import annotations

from engine.kernels.roundtrip import (
    fp4_scale_device,
    fp8_scale_device,
    hadamard_device,
    reciprocal_device,
    round_e2m1_device,
    round_e4m3_device,
)
from engine.kernels.triton_compat import INTERPRETED, cast, tl, triton

# ---------------------------------------------------------------- writing


@triton.jit
def _amax(groups, FLOOR: tl.constexpr):
    """Largest magnitude of the last axis, at least FLOOR; NaN where one is.

    Compared as integers: among magnitudes NaN is the largest.
    """
    bits = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    floor = tl.full(bits.shape, FLOOR, tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(bits, floor).to(tl.float32, bitcast=True)


@triton.jit
def _exponent_bytes(scale, amax):
    """Bytes of power-of-two scales; 255 where amax is NaN."""
    exponent = scale.to(tl.int32, bitcast=True) >> 23
    return tl.where(amax != amax, 255, exponent).to(tl.uint8)


@triton.jit
def _e4m3_codes(value, like):
    """Codes int32 of e4m3 values in float32, with the signs of `like`: rounding loses that of 0."""
    size = tl.abs(value)
    is_small = size < 0.015625
    small = (tl.where(is_small, size, 0.0) * 512.0).to(tl.int32)
    normal = ((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 20) - (120 << 3)
    code = tl.where(value != value, 0x7F, tl.where(is_small, small, normal))
    return code | ((like.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _e2m1_codes(value, like):
    """As `_e4m3_codes` for e2m1; 0 for NaN, whose group's scale tells."""
    size = tl.abs(value)
    is_small = size < 1.0
    small = (tl.where(is_small, size, 0.0) * 2.0).to(tl.int32)
    normal = ((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 22) - 252
    code = tl.where(value != value, 0, tl.where(is_small, small, normal))
    return code | ((like.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _store_fp8(to, x, there, D: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr):
    M: tl.constexpr = x.shape[0]
    G: tl.constexpr = GROUP if GROUP < D else D
    groups = tl.reshape(x.to(tl.float32), (M, D // G, G))
    column = tl.arange(0, D // G)[:, None] * G + tl.arange(0, G)[None, :]
    stored = (column < D - TAIL)[None, :, :]
    amax = _amax(tl.where(stored, groups, 0.0), 1e-4)
    scale = fp8_scale_device(amax)
    rounded = round_e4m3_device(groups * reciprocal_device(scale)[:, :, None])
    codes = tl.reshape(_e4m3_codes(rounded, groups), (M, D)).to(tl.uint8)
    at = tl.arange(0, D)[None, :]
    tl.store(to[:, None] + at, codes, mask=there & (at < D - TAIL))
    group = tl.arange(0, D // G)[None, :]
    SCALES: tl.constexpr = (D - TAIL + G - 1) // G
    ITEM: tl.constexpr = x.dtype.primitive_bitwidth // 8
    place = to[:, None] + (D - TAIL + TAIL * ITEM) + group
    tl.store(place, _exponent_bytes(scale, amax), mask=there & (group < SCALES))
    if TAIL > 0:
        tails = (to + (D - TAIL)).to(tl.pointer_type(x.dtype))
        tl.store(tails[:, None] + (at - (D - TAIL)), x, mask=there & (at >= D - TAIL))


@triton.jit
def _store_fp4(to, x, there, D: tl.constexpr, GROUP: tl.constexpr, E4M3_SCALES: tl.constexpr):
    M: tl.constexpr = x.shape[0]
    G: tl.constexpr = GROUP if GROUP < D else D
    groups = tl.reshape(x.to(tl.float32), (M, D // G, G))
    group = tl.arange(0, D // G)[None, :]
    if E4M3_SCALES:
        floor: tl.constexpr = 6.0 * 2.0**-9
        amax = _amax(groups, floor)
        ratio = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
        scale = round_e4m3_device(ratio)
        # A true quotient: it may lie exactly between two codes.
        quotient = tl.div_rn(groups, tl.broadcast_to(scale[:, :, None], groups.shape))
        scales = _e4m3_codes(scale, amax).to(tl.uint8)
        group = group // 2 + group % 2 * (D // G // 2)
    else:
        least: tl.constexpr = 6.0 * 2.0**-126
        amax = _amax(groups, least)
        scale = fp4_scale_device(amax)
        quotient = groups * reciprocal_device(scale)[:, :, None]
        scales = _exponent_bytes(scale, amax)
    HALF: tl.constexpr = 16 if D >= 32 else D // 2
    codes = _e2m1_codes(round_e2m1_device(quotient), groups)
    codes = tl.reshape(codes, (M, D // 2 // HALF, 2, HALF))
    codes = tl.sum(codes << (tl.arange(0, 2) * 4)[None, None, :, None], axis=2)
    at = tl.arange(0, D // 2)[None, :]
    tl.store(to[:, None] + at, tl.reshape(codes, (M, D // 2)).to(tl.uint8), mask=there)
    tl.store(to[:, None] + D // 2 + group, scales, mask=there)


@triton.jit
def store_record_device(
    pool, place, x, mask, D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr, matrix=None
):
    """Store rows x [M, D], float32 or bfloat16, as pack_torch packs them.

    Args:
        pool: pointer to records (uint8), or to plain rows for form "none".
        place: int64 [M], numbers of the rows.
        x: the rows.
        mask: bool [M], which to store.
        D: width.
        TAIL: rotary dimensions.
        FORM: of the pool.
        matrix: what signs_device gives, for the form with the transform.
    """
    there = mask[:, None]
    if FORM == "none":
        kind: tl.constexpr = pool.dtype.element_ty
        at = place[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(pool + at, cast(x.to(tl.float32), kind), mask=there)
    elif FORM == "fp8_64_tail":
        KEPT: tl.constexpr = TAIL * (x.dtype.primitive_bitwidth // 8)
        SIZE: tl.constexpr = (D - TAIL + KEPT + (D - TAIL + 63) // 64 + 15) // 16 * 16
        _store_fp8(pool + place * SIZE, x, there, D, TAIL, 64)
    elif FORM == "fp8_32":
        SIZE_32: tl.constexpr = (D + (D + 31) // 32 + 15) // 16 * 16
        _store_fp8(pool + place * SIZE_32, x, there, D, 0, 32)
    elif FORM == "fp4_e4m3_16":
        SIZE_16: tl.constexpr = (D // 2 + D // 16 + 15) // 16 * 16
        _store_fp4(pool + place * SIZE_16, x, there, D, 16, True)
    else:
        SIZE_4: tl.constexpr = (D // 2 + (D + 31) // 32 + 15) // 16 * 16
        if FORM == "hadamard_fp4_32":
            x = hadamard_device(x, matrix)
        _store_fp4(pool + place * SIZE_4, x, there, D, 32, False)


# ---------------------------------------------------------------- reading

_INTERPRETED = tl.constexpr(INTERPRETED)

# Called impure, or else the compiler repeats them for each layout in which it wants the values.
#: Four e4m3 bytes and four factors to four values; the bytes of a pair are parted by prmt.
_E4M3 = tl.constexpr(
    "{.reg .b32 a, b, s, z, m;"
    " mov.b32 z, 0; mov.b32 m, 0x7b807b80;"
    " prmt.b32 a, $2, z, 0x1404; prmt.b32 b, $2, z, 0x3424;"
    " shr.u32 s, a, 4; and.b32 s, s, 0x07f007f0; lop3.b32 a, a, 0x80008000, s, 0xea;"
    " mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 $0, a, $3;"
    " shr.u32 s, b, 4; and.b32 s, s, 0x07f007f0; lop3.b32 b, b, 0x80008000, s, 0xea;"
    " mul.rn.bf16x2 b, b, m; mul.rn.bf16x2 $1, b, $4;}"
)
#: Four bytes of two e2m1 codes and four factors for each nibble: the low nibbles' values, the highs'.
_E2M1 = tl.constexpr(
    "{.reg .b32 a, b, l, s, z, m;"
    " mov.b32 z, 0; mov.b32 m, 0x7e807e80;"
    " prmt.b32 a, $4, z, 0x1404; prmt.b32 b, $4, z, 0x3424;"
    " shr.u32 s, a, 2; and.b32 s, s, 0x01c001c0; shl.b32 l, a, 4; lop3.b32 l, l, 0x80008000, s, 0xea;"
    " mul.rn.bf16x2 l, l, m; mul.rn.bf16x2 $0, l, $5;"
    " shr.u32 s, b, 2; and.b32 s, s, 0x01c001c0; shl.b32 l, b, 4; lop3.b32 l, l, 0x80008000, s, 0xea;"
    " mul.rn.bf16x2 l, l, m; mul.rn.bf16x2 $1, l, $6;"
    " shr.u32 s, a, 6; and.b32 s, s, 0x01c001c0; lop3.b32 a, a, 0x80008000, s, 0xea;"
    " mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 $2, a, $7;"
    " shr.u32 s, b, 6; and.b32 s, s, 0x01c001c0; lop3.b32 b, b, 0x80008000, s, 0xea;"
    " mul.rn.bf16x2 b, b, m; mul.rn.bf16x2 $3, b, $8;}"
)


@triton.jit
def _small_e4m3(code):
    """Values float32 of a few e4m3 codes int32."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return _signed(value, code << 24)


@triton.jit
def _signed(value, sign):
    """Values, none negative, with the top bits of int32 `sign`; a zero takes its sign too."""
    return ((value.to(tl.int32, bitcast=True)) | (sign & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _small_e2m1(code):
    """Values float32 of e2m1 codes int32."""
    size = code & 7
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return _signed(value, code << 28)


@triton.jit
def _factors(words, place, BYTE: tl.constexpr, C: tl.constexpr, E4M3_SCALES: tl.constexpr, kind):
    """Scales of C neighbouring bytes of records, within one word of them: [N, C] of a kind."""
    word = tl.load(words + place * 4 + BYTE // 4)
    shift = (BYTE % 4 + tl.arange(0, C)) * 8
    code = (word[:, None] >> shift[None, :]) & 0xFF
    if E4M3_SCALES:
        scale = _small_e4m3(code)
    else:
        scale = (code << 23).to(tl.float32, bitcast=True)
        scale = tl.where(code == 255, float("nan"), scale)
    return cast(scale, kind)


@triton.jit
def _spread(factors, WIDTH: tl.constexpr):
    """Factors [N, C] over columns [N, WIDTH]."""
    N: tl.constexpr = factors.shape[0]
    C: tl.constexpr = factors.shape[1]
    return tl.reshape(tl.broadcast_to(factors[:, :, None], (N, C, WIDTH // C)), (N, WIDTH))


@triton.jit
def _times_e4m3(codes, factors, kind):
    """Values of e4m3 codes uint8 [N, B] times factors of a kind [N, B]."""
    if _INTERPRETED or kind != tl.bfloat16:
        values = _small_e4m3(codes.to(tl.int32)) * factors.to(tl.float32)
        values = cast(values, kind)
    else:
        values = tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r,r,r", [codes, factors], dtype=tl.bfloat16, is_pure=False, pack=4
        )
    return values


@triton.jit
def _times_e2m1(codes, low, high, kind):
    """Values of both nibbles of uint8 [N, B] times factors of a kind [N, B]."""
    if _INTERPRETED or kind != tl.bfloat16:
        wide = codes.to(tl.int32)
        a = cast(_small_e2m1(wide & 15) * low.to(tl.float32), kind)
        b = cast(_small_e2m1(wide >> 4) * high.to(tl.float32), kind)
    else:
        a, b = tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r,r,r,r,r", [codes, low, high],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=4,
        )  # fmt: skip
    return a, b


@triton.jit
def _piece(
    pool, place, FIRST: tl.constexpr, P: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr,
    FORM: tl.constexpr, kind,
):  # fmt: skip
    """Columns FIRST .. FIRST + P - 1 of records at `place` (int64 [N], in units of 16 bytes)."""
    ITEM: tl.constexpr = kind.primitive_bitwidth // 8
    words = pool.to(tl.pointer_type(tl.int32))
    at = pool + place[:, None] * 16
    if FORM == "fp8_64_tail":
        if FIRST >= D - TAIL:
            tails = (pool + (D - TAIL)).to(tl.pointer_type(kind))
            x = tl.load(tails + place[:, None] * (16 // ITEM) + tl.arange(0, P)[None, :])
        else:
            codes = tl.load(at + FIRST + tl.arange(0, P)[None, :])
            scale_at: tl.constexpr = D - TAIL + TAIL * ITEM + FIRST // 64
            factors = _factors(words, place, scale_at, 1, False, kind)
            x = _times_e4m3(codes, _spread(factors, P), kind)
    elif FORM == "fp8_32":
        G: tl.constexpr = 32 if D >= 32 else D
        codes = tl.load(at + FIRST + tl.arange(0, P)[None, :])
        factors = _factors(words, place, D + FIRST // G, P // G, False, kind)
        x = _times_e4m3(codes, _spread(factors, P), kind)
    else:
        HALF: tl.constexpr = 16 if D >= 32 else D // 2
        B: tl.constexpr = P // 2
        C: tl.constexpr = B // HALF
        codes = tl.load(at + FIRST // 2 + tl.arange(0, B)[None, :])
        if FORM == "fp4_e4m3_16":
            low = _factors(words, place, D // 2 + FIRST // 32, C, True, kind)
            high = _factors(words, place, D // 2 + D // 32 + FIRST // 32, C, True, kind)
        else:
            low = _factors(words, place, D // 2 + FIRST // (2 * HALF), C, False, kind)
            high = low
        a, b = _times_e2m1(codes, _spread(low, B), _spread(high, B), kind)
        N: tl.constexpr = a.shape[0]
        x = tl.join(tl.reshape(a, (N, C, HALF)), tl.reshape(b, (N, C, HALF)))
        x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (N, P))
    return x


@triton.jit
def _pieces(
    pool, place, FIRST: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    TAIL: tl.constexpr, FORM: tl.constexpr, kind,
):  # fmt: skip
    """COUNT pieces of P columns from FIRST on, side by side."""
    if COUNT == 1:
        x = _piece(pool, place, FIRST, P, D, TAIL, FORM, kind)
    else:
        N: tl.constexpr = place.shape[0]
        HALF: tl.constexpr = COUNT // 2
        a = _pieces(pool, place, FIRST, HALF, P, D, TAIL, FORM, kind)
        b = _pieces(pool, place, FIRST + HALF * P, HALF, P, D, TAIL, FORM, kind)
        x = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (N, COUNT * P))
    return x


@triton.jit
def record_tile_device(
    pool, place, D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr, kind: tl.constexpr
):
    """Values [N, D] of a kind of rows that lie anywhere.

    Args:
        pool: pointer that places count from: uint8, or plain numbers for form "none".
        place: int64 [N], in units of 16 bytes; of 8 numbers for form "none".
        D: width.
        TAIL: rotary dimensions.
        FORM: of the rows.
        kind: float32 or bfloat16.
    """
    if FORM == "none":
        x = tl.load(pool + place[:, None] * 8 + tl.arange(0, D)[None, :]).to(kind)
    else:
        FP8: tl.constexpr = FORM == "fp8_32" or FORM == "fp8_64_tail"
        MOST: tl.constexpr = 64 if FP8 else 128
        WHOLE: tl.constexpr = MOST if MOST < D else D
        P: tl.constexpr = TAIL if FORM == "fp8_64_tail" and TAIL < WHOLE else WHOLE
        x = _pieces(pool, place, 0, D // P, P, D, TAIL, FORM, kind)
    return x
