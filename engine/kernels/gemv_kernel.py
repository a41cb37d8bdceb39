"""Triton kernel of engine.kernels.gemv: products of few rows, several in one launch."""

from __future__ import annotations

from engine.kernels.codes import encode_device, power_device
from engine.kernels.overlap import await_previous, begin_next
from engine.kernels.roundtrip import fp8_device
from engine.kernels.triton_compat import cast, dot, tl, triton


@triton.jit
def _e4m3_as_bf16(w):
    """Values of e4m3 codes [..., 4 n] times 2 ** -120 as bfloat16, four at a time.

    A code's seven low bits are the lowest exponent and the highest mantissa bits of a bfloat16. A
    byte permutation can extend signs, so that sign and bits arrive by one shift and one mask.
    """
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 a, b;
        prmt.b32 a, $2, 0, 0x9180;
        prmt.b32 b, $2, 0, 0xB3A2;
        shl.b32 a, a, 4;
        shl.b32 b, b, 4;
        and.b32 $0, a, 0x87F087F0;
        and.b32 $1, b, 0x87F087F0;
        }
        """,
        constraints="=r,=r,r",
        args=[w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _with(values, value):
    """A tuple with one more value."""
    return values + (value,)  # noqa: RUF005 - the compiler has no starred elements


@triton.constexpr_function
def _side(block, step, bt):
    """Columns of a step that share a scale: a step takes as many blocks as it has.

    All of them where the blocks of a row lie apart (see `_tile`).
    """
    return block if 0 < block < step and bt >= 16 else step


@triton.jit
def _scales(
    scale,
    n0,
    k,
    N,
    K,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    SIDE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Scale bytes of columns n0 ... of the result for the pieces of a step at column k.

    One scalar per piece, or [1, BN] where columns differ, or [16, BN] where a row's blocks do.
    Beyond the last column of the weight they are those of the last. They stay bytes until they are
    used: whatever is done with a value that is carried round a loop is waited for within the round.
    """
    wide = tl.cdiv(K, BLOCK)
    found = ()
    for piece in tl.static_range(PIECES):
        block = tl.minimum(k + piece * SIDE, K - 1) // BLOCK
        if BT < 16:
            n = (n0 + tl.arange(0, BN))[None, :]
            block += (tl.arange(0, 16) % (16 // BT))[:, None]
            byte = tl.load(
                scale + n // BLOCK * wide + block, mask=(n < N) & (block < wide), other=127
            )
        elif BN <= BLOCK:
            byte = tl.load(scale + n0 // BLOCK * wide + block)
        else:
            n = (n0 + tl.arange(0, BN))[None, :]
            byte = tl.load(scale + n // BLOCK * wide + block, mask=n < N, other=127)
        found = _with(found, byte)
    return found


@triton.jit
def _tile(
    x,
    w,
    scale,
    bytes_ahead,
    n0,
    t0,
    first,
    last,
    T,
    N,
    K,
    stride,
    HOPPER: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over k in [first, last) for rows t0 ... and columns n0 ... : float32 [BT, BN].

    A tensor core takes 16 rows. Where there are fewer, each row of x is there once per block of a
    step, with zeros outside that block, so that blocks with scales of their own are read and
    multiplied together and their sums still lie apart.
    """
    TALL: tl.constexpr = 16 if BT < 16 else BT
    APART: tl.constexpr = TALL // BT
    line = tl.arange(0, TALL)
    t = t0 + line // APART
    n = n0 + tl.arange(0, BN)
    SIDE: tl.constexpr = _side(BLOCK, BK, BT)
    PIECES: tl.constexpr = BK // SIDE
    k = tl.arange(0, SIDE)
    acc = tl.zeros((TALL, BN), tl.float32)
    wide: tl.constexpr = (x.dtype.element_ty == tl.float32) | (w.dtype.element_ty == tl.float32)
    work: tl.constexpr = tl.float32 if wide else tl.bfloat16
    quick: tl.constexpr = HOPPER and not wide
    live = (t < T)[:, None]
    if APART > 1:
        live = live & (k[None, :] // BLOCK == line[:, None] % APART)
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        if BLOCK > 0:
            # The next step's scales are on their way while this step's blocks are multiplied.
            bytes_here = bytes_ahead
            bytes_ahead = _scales(scale, n0, k0 + BK, N, K, BLOCK, BT, BN, SIDE, PIECES)
        for piece in tl.static_range(PIECES):
            at = k0 + piece * SIDE + k
            rows = x + t[:, None] * stride + at[None, :]
            columns = w + n[None, :].to(tl.int64) * K + at[:, None]
            if EVEN:
                a = tl.load(rows, mask=live, other=0.0)
                b = tl.load(columns)
            else:
                inside = at < last
                a = tl.load(rows, mask=live & inside[None, :], other=0.0)
                b = tl.load(columns, mask=(n < N)[None, :] & inside[:, None], other=0.0)
            if BLOCK > 0:
                b = _e4m3_as_bf16(b) if quick else b.to(tl.float32).to(work)
                factor = power_device(bytes_here[piece])
                products = dot(a.to(work), b, tl.zeros((TALL, BN), tl.float32))
                # What the codes lack comes in two steps, half of it here and half at the end:
                # neither the scale nor the sums may leave their range.
                acc += products * (factor * 2.0**60 if quick else factor)
            else:
                acc = dot(a.to(work), b.to(work), acc)
    if APART > 1:
        acc = tl.sum(tl.reshape(acc, (BT, APART, BN)), axis=1)
    return acc * 2.0**60 if quick and BLOCK > 0 else acc


@triton.jit
def _tile_left(
    x,
    w,
    scale,
    bytes_ahead,
    n0,
    t0,
    first,
    last,
    T,
    N,
    K,
    stride,
    HOPPER: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do as `_tile`, with the weight as the left operand and 16 rows or more.

    Hopper's tensor cores take the left operand from registers, where a packed weight is unpacked,
    and the right one from shared memory, where x lies as it came: nothing is written back.
    """
    t = t0 + tl.arange(0, BT)
    n = n0 + tl.arange(0, BN)
    SIDE: tl.constexpr = _side(BLOCK, BK, BT)
    PIECES: tl.constexpr = BK // SIDE
    k = tl.arange(0, SIDE)
    acc = tl.zeros((BN, BT), tl.float32)
    live = (t < T)[None, :]
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        if BLOCK > 0:
            bytes_here = bytes_ahead
            bytes_ahead = _scales(scale, n0, k0 + BK, N, K, BLOCK, BT, BN, SIDE, PIECES)
        for piece in tl.static_range(PIECES):
            at = k0 + piece * SIDE + k
            rows = x + t[None, :] * stride + at[:, None]
            columns = w + n[:, None].to(tl.int64) * K + at[None, :]
            if EVEN:
                a = tl.load(columns)
                b = tl.load(rows, mask=live, other=0.0)
            else:
                inside = at < last
                a = tl.load(columns, mask=(n < N)[:, None] & inside[None, :], other=0.0)
                b = tl.load(rows, mask=live & inside[:, None], other=0.0)
            if BLOCK > 0:
                a = _e4m3_as_bf16(a) if HOPPER else a.to(tl.float32).to(tl.bfloat16)
                factor = power_device(bytes_here[piece])
                if BN > BLOCK:
                    factor = tl.trans(factor)
                products = dot(a, b, tl.zeros((BN, BT), tl.float32))
                acc += products * (factor * 2.0**60 if HOPPER else factor)
            else:
                acc = dot(a, b, acc)
    acc = tl.trans(acc)
    return acc * 2.0**60 if HOPPER and BLOCK > 0 else acc


@triton.jit
def _finish(acc, out, powers, n0, t, T, N, GROUP: tl.constexpr):
    """Cast, round and store a tile of the result, whose columns begin at n0."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = n0 + tl.arange(0, acc.shape[1])
    if dtype == tl.float8e4nv:
        encode_device(cast(acc, tl.bfloat16).to(tl.float32), out, powers, t, n0, T, N, GROUP)
    else:
        y = cast(acc, dtype)
        if GROUP > 0:
            y = cast(fp8_device(y.to(tl.float32), GROUP, 0), dtype)
        inside = (t < T)[:, None] & (n < N)[None, :]
        tl.store(out + t[:, None].to(tl.int64) * N + n[None, :], y, mask=inside)


@triton.jit
def _job(
    x,
    w,
    scale,
    out,
    powers,
    scratch,
    counters,
    program,
    T,
    N,
    K,
    stride,
    rows_of_group,
    split,
    share,
    HOPPER: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    WAITS: tl.constexpr,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    LEFT: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program of one product: a tile of the result, over one share of K."""
    tiles = tl.cdiv(N, BN)
    tile = program // split
    part = program % split
    n0 = tile % tiles * BN
    t0 = tile // tiles * BT
    first = part * share
    last = tl.minimum(first + share, K)
    scales = ()
    if BLOCK > 0:
        side: tl.constexpr = _side(BLOCK, BK, BT)
        scales = _scales(scale, n0, first, N, K, BLOCK, BT, BN, side, BK // side)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    x += n0 // rows_of_group * K
    if LEFT:
        acc = _tile_left(
            x, w, scale, scales, n0, t0, first, last, T, N, K, stride,
            HOPPER, BLOCK, EVEN, BT, BN, BK, STAGES,
        )  # fmt: skip
    else:
        acc = _tile(
            x, w, scale, scales, n0, t0, first, last, T, N, K, stride,
            HOPPER, BLOCK, EVEN, BT, BN, BK, STAGES,
        )  # fmt: skip
    t = t0 + tl.arange(0, BT)
    n = n0 + tl.arange(0, BN)
    inside = (t < T)[:, None] & (n < N)[None, :]
    own = (t[:, None] * split).to(tl.int64) * N + n[None, :]
    if PARTS:
        tl.store(out + own + part * N, acc, mask=inside)
    elif not WAITS:
        _finish(acc, out, powers, n0, t, T, N, GROUP)
    else:
        tl.store(scratch + own + part * N, acc, mask=inside)
        # All threads' stores come before the count that says they are there.
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if done == split - 1:
            _add_up(scratch, out, powers, n0, t0, T, N, split, GROUP, BT, BN, MOST)
            tl.store(counters + tile, 0)


@triton.jit
def _add_up(
    scratch,
    out,
    powers,
    n0,
    t0,
    T,
    N,
    split,
    GROUP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    MOST: tl.constexpr,
):
    """Add the shares of a tile's rows up, in order, and finish them, some rows at a time.

    All shares of those rows are asked for at once: each round waits for memory once.
    """
    SOME: tl.constexpr = (16 if BT >= 64 else 8) * (2 if MOST <= 4 else 1)
    n = n0 + tl.arange(0, BN)
    for r in tl.range(t0, tl.minimum(t0 + BT, T), SOME, num_stages=1):
        t = r + tl.arange(0, SOME)
        inside = (t < T)[:, None] & (n < N)[None, :]
        places = scratch + (t[:, None] * split).to(tl.int64) * N + n[None, :]
        total = tl.zeros((SOME, BN), tl.float32)
        for part in tl.static_range(MOST):
            there = inside & (tl.full((1, 1), part, tl.int32) < split)
            share = tl.load(places + part * N, mask=there, other=0.0, cache_modifier=".cg")
            total += share
        _finish(total, out, powers, n0, t, T, N, GROUP)


@triton.jit(do_not_specialize=["ends", "T", "splits"])
def gemv_kernel(
    xs,
    ws,
    scales,
    outs,
    powers,
    scratches,
    counters,
    ends,
    T,
    Ns,
    Ks,
    strides,
    group_rows,
    splits,
    shares,
    HOPPER: tl.constexpr,
    OVERLAP: tl.constexpr,
    MOST: tl.constexpr,
    FORMS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Programs of up to four products.

    FORMS: (block, even, parts, waits, out group) of each; TILES: (bt, bn, bk, stages, left).
    """
    program = tl.program_id(0)
    first = 0
    for j in tl.static_range(len(TILES)):
        if (program >= first) & (program < ends[j]):
            _job(
                xs[j], ws[j], scales[j], outs[j], powers[j], scratches[j], counters[j],
                program - first, T, Ns[j], Ks[j], strides[j], group_rows[j], splits[j], shares[j],
                HOPPER, OVERLAP, FORMS[j][0], FORMS[j][1], FORMS[j][2], FORMS[j][3], FORMS[j][4],
                TILES[j][0], TILES[j][1], TILES[j][2], TILES[j][3], TILES[j][4], MOST,
            )  # fmt: skip
        first = ends[j]
