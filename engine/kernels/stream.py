"""Products of a few rows with narrow weights, at the rate at which weights can be read.

With up to eight rows a product is a stream of weight bytes: each is read once, turned into bfloat16
in registers and fed to tensor cores, weights as the operand with 16 rows (A), the rows of x as the
one with 8 columns (B). Everything here is written for one thread: a tensor has one element per
thread (so element i belongs to thread i), and a value of 4 bytes holds two bfloat16 numbers.

A thread is (warp, g, t), lane = 4 g + t. In a *chunk* of 128 columns it owns the 32 columns
32 t ..., which are one group of FP4 scales, of weight rows g and g + 8 of a tile, and of row g of
x. A sum over columns may take them in any order, so the pairs that go into an instruction are the
ones that are cheapest to unpack, and x is paired the same way; words of e2m1 are stored so that
their pairs are neighbours (engine.kernels.fp4).

Unpacking: a narrow float moved to the top of a bfloat16's mantissa and the bottom of its exponent
is its value times 2**-126 (e2m1) or 2**-120 (e4m3), subnormals included. One multiplication puts
that right together with the group's scale. To keep the factor finite it leaves 2**-16 to be undone
by `SUM_SCALE` on the sums; scales up to 2**17 are exact.

Tensor core layout: PTX ISA, mma.m16n8k16. Instructions that have no Triton name stand in
assembly; the interpreter takes equal plain forms.
"""

from __future__ import annotations

from engine.kernels.triton_compat import INTERPRETED, tl, triton

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Sign bits of two bfloat16 numbers.
_SIGNS = tl.constexpr(-0x7FFF8000)
#: Signs and values of two e2m1 codes where bfloat16 has them, 0x81C081C0, and all but one bit.
_PAIR = tl.constexpr(-0x7E3F7E40)
_TOP = tl.constexpr(-0x7E7F7E80)
#: What sums of `accumulate` are to be multiplied by.
SUM_SCALE = tl.constexpr(65536.0)
#: Columns of a chunk.
CHUNK = 128

_MULTIPLY = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
_ZIP = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


@triton.jit
def load16(pointer, use, ONCE: tl.constexpr = False):
    """Read four int32 from `pointer` (to int32, at 16 bytes), zeros where not `use`.

    ONCE: whether nobody will read them again.
    """
    NT: tl.constexpr = pointer.shape[0]
    words = tl.load(
        pointer[:, None] + tl.arange(0, 4)[None, :],
        mask=use[:, None],
        other=0,
        eviction_policy="evict_first" if ONCE else "",
    )
    even, odd = tl.split(tl.reshape(words, (NT, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _pair(low, high):
    """Two float32 that are bfloat16 numbers."""
    low = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return low | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def multiply_pairs(a, b):
    """Products of the two numbers of a with the two of b."""
    if _INTERPRETED:
        return _pair(_low(a) * _low(b), _high(a) * _high(b))
    return tl.inline_asm_elementwise(
        _MULTIPLY, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _quads(pair, NT: tl.constexpr):
    """The two numbers of each thread's pair, by quad: [NT / 32, 8, 4] each."""
    shape: tl.constexpr = (NT // 32, 8, 4)
    return tl.reshape(_low(pair), shape), tl.reshape(_high(pair), shape)


@triton.jit
def _plain_rows(a0, a1, b0, b1, NT: tl.constexpr):
    """Sums over the threads of a quad for the rows that a0 and a1 belong to: c of both columns."""
    total = tl.zeros((NT // 32, 8, 8), tl.float32)
    for i in tl.static_range(2):
        total += tl.sum(a0[i][:, :, None, :] * b0[i][:, None, :, :], axis=3)
        total += tl.sum(a1[i][:, :, None, :] * b1[i][:, None, :, :], axis=3)
    even, odd = tl.split(tl.reshape(total, (NT // 32, 8, 4, 2)))
    return tl.reshape(even, (NT,)), tl.reshape(odd, (NT,))


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, c):
    """Add 16 columns of a tile times x to c.

    c is a tuple of four float32, sums of (weight row g, x row 2t), (g, 2t + 1), (g + 8, 2t) and
    (g + 8, 2t + 1). a0 and a2 are pairs of weight row g, a1 and a3 the same columns of row g + 8,
    b0 and b1 those columns of x's row g.
    """
    if _INTERPRETED:
        NT: tl.constexpr = a0.shape[0]
        first, second = _quads(b0, NT), _quads(b1, NT)
        s0, s1 = _plain_rows(_quads(a0, NT), _quads(a2, NT), first, second, NT)
        s2, s3 = _plain_rows(_quads(a1, NT), _quads(a3, NT), first, second, NT)
        return (c[0] + s0, c[1] + s1, c[2] + s2, c[3] + s3)
    return tl.inline_asm_elementwise(
        _MMA,
        "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


# ---------------------------------------------------------------- weights


@triton.jit
def _fp4_pairs(q, factor):
    """Columns (2 i, 2 i + 1) of the eight in q, i = 0 .. 3; see engine.kernels.fp4."""
    p0 = (q << 6) & _PAIR
    p1 = (q << 2) & _PAIR
    p2 = (((q >> 4) & 0x0FFFFFFF) | (q << 28)) & _PAIR
    p3 = (q & _TOP) | ((q >> 8) & 0x00400040)
    return (
        multiply_pairs(p0, factor),
        multiply_pairs(p1, factor),
        multiply_pairs(p2, factor),
        multiply_pairs(p3, factor),
    )


@triton.jit
def _fp8_pairs(q, factor):
    """Columns (0, 2) and (1, 3) of the four in q."""
    p0 = ((q << 8) & _SIGNS) | ((q << 4) & 0x07F007F0)
    p1 = (q & _SIGNS) | ((q >> 4) & 0x07F007F0)
    return multiply_pairs(p0, factor), multiply_pairs(p1, factor)


@triton.jit
def accumulate(step, xs, FIRST: tl.constexpr, c, FP4: tl.constexpr):
    """Add a fetched step times x to c.

    Args:
        step: four words of weight row g, four of row g + 8, the scale bytes of both.
        xs: of `rows_of_x`.
        FIRST: where this step's begin in xs (16 of them for e2m1, 8 for e4m3).
        c: four float32, as `mma` has them, to be multiplied by SUM_SCALE at last.
        FP4: e2m1, else e4m3.
    """
    bias: tl.constexpr = 110 if FP4 else 104
    # 2**(scale - 127) times what `_..._pairs` leave out, twice, as bits of bfloat16.
    f0 = (step[8] + bias) * 0x00800080
    f1 = (step[9] + bias) * 0x00800080
    for j in tl.static_range(4):
        if FP4:
            p = _fp4_pairs(step[j], f0)
            r = _fp4_pairs(step[4 + j], f1)
            c = mma(p[0], r[0], p[1], r[1], xs[FIRST + 4 * j], xs[FIRST + 4 * j + 1], c)
            c = mma(p[2], r[2], p[3], r[3], xs[FIRST + 4 * j + 2], xs[FIRST + 4 * j + 3], c)
        else:
            p = _fp8_pairs(step[j], f0)
            r = _fp8_pairs(step[4 + j], f1)
            c = mma(p[0], r[0], p[1], r[1], xs[FIRST + 2 * j], xs[FIRST + 2 * j + 1], c)
    return c


# ---------------------------------------------------------------- x


@triton.jit
def _zip(a, b):
    """(low of a, low of b) and (high of a, high of b)."""
    if _INTERPRETED:
        low = (a & 0xFFFF) | (b << 16)
        high = ((a >> 16) & 0xFFFF) | (b & -65536)
    else:
        low, high = tl.inline_asm_elementwise(
            _ZIP, "=&r,=&r,r,r", [a, b], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return low, high


@triton.jit
def rows_of_x(row, first_group, C: tl.constexpr, K: tl.constexpr, FP4: tl.constexpr):  # fmt: skip
    """Read a thread's columns of its row of x, paired as `accumulate` wants them.

    Args:
        row: pointer (to int32) to its bfloat16 row [K].
        first_group: its 32 columns of the first chunk; 4 more in each further one.
        C: chunks of a thread.
        K: columns of x.
        FP4: pairs for e2m1, else for e4m3.

    Returns:
        16 * C int32.
    """
    xs = ()
    for c in tl.static_range(C):
        group = first_group + 4 * c
        start = row + group * 16
        a = load16(start, group < K // 32)
        b = load16(start + 4, group < K // 32)
        d = load16(start + 8, group < K // 32)
        e = load16(start + 12, group < K // 32)
        pairs = (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3],
                 d[0], d[1], d[2], d[3], e[0], e[1], e[2], e[3])  # fmt: skip
        for j in tl.static_range(4):
            if FP4:
                p = (pairs[4 * j], pairs[4 * j + 1])
                r = (pairs[4 * j + 2], pairs[4 * j + 3])
            else:
                p = _zip(pairs[4 * j], pairs[4 * j + 1])
                r = _zip(pairs[4 * j + 2], pairs[4 * j + 3])
            xs = xs + (p[0], p[1], r[0], r[1])  # type: ignore[assignment]  # noqa: RUF005
    return xs
