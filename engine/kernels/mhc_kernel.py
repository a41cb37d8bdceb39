"""Triton kernels of engine.kernels.mhc: two or three launches from one site to the next.

`mix_row` closes a site and projects the new streams onto the next site's mixing logits, in shares
of d; for more than a few rows `mix_rows` does, whose tiles of rows read fn less often, and for very
many `mix_row` only closes, since projecting is then a product like any other.
`open_site` adds the shares up, in order, and has two kinds of programs: one per row that makes the
sublayer's input, and others that make the coefficients, which nothing needs before the sublayer's
output: Sinkhorn's long chain of divisions delays nobody.
"""

from __future__ import annotations

from engine.kernels.overlap import await_previous, begin_next, fetch
from engine.kernels.roundtrip import fp8_device
from engine.kernels.triton_compat import INTERPRETED, cast, dot, tl, triton

#: Mixing logits per row in the partial sums: S * (S + 2) = 24 of them, the sum of squares, unused.
SLOTS = 32
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _dot_fine(acc, a, b):
    """Add a [M, K] @ b [K, N] to acc, b float32, with float32's precision."""
    if a.dtype == tl.float32:
        acc = dot(a, b, acc)
    else:
        # Three bfloat16 pieces hold float32's 24 bits; their products with bfloat16 are exact.
        high = cast(b, tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = cast(rest, tl.bfloat16)
        low = cast(rest - middle.to(tl.float32), tl.bfloat16)
        acc = dot(a, high, acc)
        acc = dot(a, middle, acc)
        acc = dot(a, low, acc)
    return acc


@triton.jit
def _with(values, value):
    """A tuple with one more value."""
    return values + (value,)  # noqa: RUF005 - the compiler has no starred elements


@triton.jit
def _loads(places, apart, mask, COUNT: tl.constexpr):
    """COUNT tiles, each `apart` behind the one before, as a tuple; 0 where masked."""
    found = ()
    for i in tl.static_range(COUNT):
        found = _with(found, tl.load(places + i * apart, mask=mask, other=0.0))
    return found


@triton.jit
def _begin(
    fn, first, share, D, S: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Have this program's share of fn fetched, then wait for the kernel before."""
    if OVERLAP and M > 0:
        slot = tl.minimum(tl.arange(0, SLOTS), M - 1)
        for j in tl.static_range(S):
            fetch(fn + slot * S * D + j * D + first, tl.minimum(share, D - first) * 4, 2)
    await_previous(OVERLAP)
    begin_next(OVERLAP)


@triton.jit
def _close(streams, parts, post, comb, out, row, d, D, S: tl.constexpr, P: tl.constexpr):
    """Places d [BD] of one row's new streams, as a tuple; also stored to out."""
    inside = d < D
    dtype: tl.constexpr = streams.dtype.element_ty
    # Everything is asked for before anything is stored: a load never overtakes a store.
    gains = ()
    weights = ()
    old = ()
    summands = ()
    for p in tl.static_range(P):
        part = tl.load(parts + (row * P + p) * D + d, mask=inside, other=0.0)
        summands = _with(summands, part.to(tl.float32))
    for i in tl.static_range(S):
        gains = _with(gains, tl.load(post + row * S + i))
        stream = tl.load(streams + (row * S + i) * D + d, mask=inside, other=0.0)
        old = _with(old, stream.to(tl.float32))
    for i in tl.static_range(S * S):
        weights = _with(weights, tl.load(comb + row * S * S + i))
    y = tl.zeros(d.shape, tl.float32)
    for p in tl.static_range(P):
        y += summands[p]
    y = cast(y, dtype).to(tl.float32)
    new = ()
    for j in tl.static_range(S):
        stream = y * gains[j]
        for i in tl.static_range(S):
            stream += weights[i * S + j] * old[i]
        new = _with(new, cast(stream, dtype))
    for j in tl.static_range(S):
        tl.store(out + (row * S + j) * D + d, new[j], mask=inside)
    return new


@triton.jit(do_not_specialize=["T", "shares"])
def mix_row(
    streams,
    parts,
    post,
    comb,
    fn,
    out,
    sums,
    T,
    D,
    shares,
    S: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    PROJECT: tl.constexpr,
    SLOTS: tl.constexpr,
    BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Close a site (P > 0 summands) and, where M > 0, sum up over BD places of one row's d.

    sums [T, shares, SLOTS]: fn . R in slots 0 .. M - 1 (0 unless PROJECT), the sum of squares in M.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    _begin(fn, split * BD, BD, D, S, M if PROJECT else 0, SLOTS, OVERLAP)
    slot = tl.arange(0, SLOTS)
    acc = tl.zeros((SLOTS, BD), tl.float32)
    squares = tl.zeros((BD,), tl.float32)
    d = split * BD + tl.arange(0, BD)
    inside = d < D
    lines = ()
    if PROJECT:
        for j in tl.static_range(S):
            places = fn + slot[:, None] * S * D + j * D + d[None, :]
            mask = (slot < M)[:, None] & inside[None, :]
            lines = _with(lines, tl.load(places, mask=mask, other=0.0))
    if P > 0:
        new = _close(streams, parts, post, comb, out, row, d, D, S, P)
    for j in tl.static_range(S if M > 0 else 0):
        if P > 0:
            stream = new[j].to(tl.float32)
        else:
            stream = tl.load(streams + (row * S + j) * D + d, mask=inside, other=0.0)
            stream = stream.to(tl.float32)
        if PROJECT:
            # Slot M is the sum of squares: the stream times itself.
            line = tl.where((slot == M)[:, None], stream[None, :], lines[j])
            acc += line * stream[None, :]
        else:
            squares += stream * stream
    if M > 0:
        if PROJECT:
            result = tl.sum(acc, axis=1)
        else:
            result = tl.where(slot == M, tl.sum(squares), 0.0)
        tl.store(sums + (row * shares + split) * SLOTS + slot, result)


@triton.jit
def _settled(x):
    """A tile of bfloat16 as it is, worked out once.

    Every warp holds the left operand of a product of so few rows. Left alone, the compiler would
    have each load and compute the whole tile rather than exchange the result.
    """
    if not _INTERPRETED and x.dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return x


@triton.jit(do_not_specialize=["T", "shares"])
def mix_rows(
    streams,
    parts,
    post,
    comb,
    fn,
    out,
    sums,
    T,
    D,
    shares,
    S: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Do as `mix_row` for BT rows and BD places of d, and project."""
    first = tl.program_id(0) * BT
    split = tl.program_id(1)
    _begin(fn, split * BD, BD, D, S, M, SLOTS, OVERLAP)
    # Offsets within the tile are 32 bits wide: wider ones would take registers.
    start = first.to(tl.int64)
    streams += start * S * D
    parts += start * P * D
    out += start * S * D
    t = tl.arange(0, BT)
    row = t[:, None]
    d = split * BD + tl.arange(0, BD)
    live = t < T - first
    inside = live[:, None] & (d < D)[None, :]
    slot = tl.arange(0, SLOTS)
    dtype: tl.constexpr = streams.dtype.element_ty
    summands = _loads(parts + row * P * D + d[None, :], D, inside, P)
    own = row * S * D + d[None, :]
    old = _loads(streams + own, D, inside, S)
    places = fn + slot[None, :] * S * D + d[:, None]
    lines = _loads(places, D, (slot < M)[None, :] & (d < D)[:, None], S)
    gains = _loads(post + (first + t) * S, 1, live, S if P > 0 else 0)
    weights = _loads(comb + (first + t) * S * S, 1, live, S * S if P > 0 else 0)
    y = tl.zeros((BT, BD), tl.float32)
    if P > 0:
        for p in tl.static_range(P):
            y += summands[p].to(tl.float32)
        y = cast(y, dtype).to(tl.float32)
    acc = tl.zeros((BT, SLOTS), tl.float32)
    squares = tl.zeros((BT, BD), tl.float32)
    for j in tl.static_range(S):
        stream = old[j].to(tl.float32)
        new = cast(stream, dtype)
        if P > 0:
            stream = y * gains[j][:, None]
            for i in tl.static_range(S):
                stream += weights[i * S + j][:, None] * old[i].to(tl.float32)
            new = cast(stream, dtype)
            tl.store(out + own + j * D, new, mask=inside)
            new = _settled(new)
        squares += new.to(tl.float32) * new.to(tl.float32)
        acc = _dot_fine(acc, new, lines[j])
    acc = tl.where((slot == M)[None, :], tl.sum(squares, axis=1)[:, None], acc)
    place = sums + start * shares * SLOTS + (row * shares + split) * SLOTS + slot[None, :]
    tl.store(place, acc, mask=live[:, None])


@triton.jit
def split_rows(fn, out, N, M: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Three bfloat16 pieces of fn [M, N]: out [3, SLOTS, N], the largest first, zeros from M on."""
    slot = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(fn + slot * N + n, mask=n < tl.where(slot < M, N, 0), other=0.0)
    for piece in tl.static_range(3):
        part = cast(value, tl.bfloat16)
        tl.store(out + (piece * SLOTS + slot) * N + n, part, mask=n < N)
        value -= part.to(tl.float32)


@triton.jit
def _sigmoid(x):
    """Logistic function, without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def _totals(sums, t, T, SLOTS: tl.constexpr, SPLITS: tl.constexpr):
    """Sums over the shares of rows t [R]: [R, SLOTS]."""
    COUNT: tl.constexpr = triton.next_power_of_2(SPLITS)
    share = tl.arange(0, COUNT)[None, :, None]
    places = sums + (t.to(tl.int64)[:, None, None] * SPLITS + share) * SLOTS
    places += tl.arange(0, SLOTS)[None, None, :]
    live = (t < T)[:, None, None] & (share < SPLITS)
    return tl.sum(tl.load(places, mask=live, other=0.0), axis=1)


@triton.jit
def _logits(
    sums, base, t, T, D, eps, S: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Mixing logits of rows t [R] in slots 0 .. M - 1 of [R, SLOTS]."""
    slot = tl.arange(0, SLOTS)
    totals = _totals(sums, t, T, SLOTS, SPLITS)
    squares = tl.sum(tl.where((slot == M)[None, :], totals, 0.0), axis=1)
    rho = tl.rsqrt(squares / (S * D) + eps)
    return totals * rho[:, None] + tl.load(base + slot, mask=slot < M, other=0.0)[None, :]


@triton.jit
def _coefficients(
    sums,
    base,
    logits,
    pre,
    post,
    comb,
    t,
    T,
    D,
    eps,
    hc_eps,
    S: tl.constexpr,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Write pre, post and comb of rows t [R]; a row's matrix lies in the registers of one thread."""
    live = t < T
    slot = tl.arange(0, SLOTS)[None, :]
    found = _logits(sums, base, t, T, D, eps, S, M, SLOTS, SPLITS)
    gate = _sigmoid(found)
    gates = live[:, None] & (slot < S)
    tl.store(pre + t[:, None] * S + slot, gate + hc_eps, mask=gates)
    gates = live[:, None] & (slot >= S) & (slot < 2 * S)
    tl.store(post + t[:, None] * S + slot - S, 2.0 * gate, mask=gates)
    # From a tile over threads to one value per thread: cheapest through memory.
    tl.store(logits + t[:, None] * SLOTS + slot, found, mask=live[:, None])
    tl.debug_barrier()
    c = ()
    for i in tl.static_range(S):
        line = ()
        for j in tl.static_range(S):
            place = logits + t * SLOTS + 2 * S + i * S + j
            line = _with(line, tl.load(place, mask=live, other=0.0))
        top = _largest(line, S)
        powers = ()
        total = tl.zeros(t.shape, tl.float32)
        for j in tl.static_range(S):
            power = tl.exp(line[j] - top)
            powers = _with(powers, power)
            total += power
        for j in tl.static_range(S):
            c = _with(c, powers[j] / total + hc_eps)
    # The matrix stays as it is; what its rows and columns are divided by is what changes. Nothing
    # else lies in the chain of forty steps.
    one = tl.full(t.shape, 1.0, tl.float32)
    lines = ()
    for _ in tl.static_range(S):
        lines = _with(lines, one)
    columns = _divisors(c, lines, lines, hc_eps, 1, S)
    for _ in range(ITERATIONS - 1):
        lines = _divisors(c, columns, lines, hc_eps, S, S)
        columns = _divisors(c, lines, columns, hc_eps, 1, S)
    for i in tl.static_range(S * S):
        value = c[i] * _inverse(lines[i // S]) * _inverse(columns[i % S])
        tl.store(comb + t * S * S + i, value, mask=live)


@triton.jit
def _largest(values, S: tl.constexpr):
    """Elementwise maximum of S tensors."""
    top = values[0]
    for j in tl.static_range(1, S):
        top = tl.maximum(top, values[j])
    return top


@triton.jit
def _inverse(x):
    """1 / x to a unit in the last place, of normal numbers."""
    if _INTERPRETED:
        result = 1.0 / x
    else:
        # One instruction; a division has ten, in a chain of forty.
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _divisors(c, others, before, hc_eps, KEPT: tl.constexpr, S: tl.constexpr):
    """Divide S x S values by sums: over the last axis where the first is kept, else over the first.

    The values are c[i, j] / (lines[i] * columns[j]). To divide those of a line by their sum and
    hc_eps is to make its divisor the sum of c[i, j] / columns[j] and hc_eps times what it was.

    Args:
        c: S * S values.
        others: divisors of the other axis, S.
        before: of this one.
        hc_eps: as said.
        KEPT: the stride of the kept axis: S for the first, 1 for the last.
        S: streams.

    Returns:
        the S divisors of the kept axis.
    """
    STEP: tl.constexpr = S + 1 - KEPT
    inverse = ()
    for b in tl.static_range(S):
        inverse = _with(inverse, _inverse(others[b]))
    result = ()
    for a in tl.static_range(S):
        even = hc_eps * before[a]
        odd = tl.zeros_like(even)
        for b in tl.static_range(0, S, 2):
            even += c[a * KEPT + b * STEP] * inverse[b]
        for b in tl.static_range(1, S, 2):
            odd += c[a * KEPT + b * STEP] * inverse[b]
        result = _with(result, even + odd)
    return result


@triton.jit
def _input(
    streams,
    weights,
    sums,
    base,
    norm,
    x,
    xq,
    t,
    D,
    eps,
    hc_eps,
    OWN: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm the weighted sum of a row's streams; OWN: weights from the logits, else as given."""
    d = tl.arange(0, BLOCK)
    inside = d < D
    dtype: tl.constexpr = streams.dtype.element_ty
    row = t.to(tl.int64)
    gain = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    # The long loads are under way while the weights are worked out.
    lines = ()
    for s in tl.static_range(S):
        lines = _with(lines, tl.load(streams + (row * S + s) * D + d, mask=inside, other=0.0))
    if OWN:
        slot = tl.arange(0, SLOTS)[None, :]
        one = t + tl.arange(0, 1)
        gate = _sigmoid(_logits(sums, base, one, t + 1, D, eps, S, M, SLOTS, SPLITS)) + hc_eps
    u = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        if OWN:
            weight = tl.sum(tl.where(slot == s, gate, 0.0))
        else:
            weight = tl.load(weights + row * S + s)
        u += weight * lines[s].to(tl.float32)
    u = cast(u, dtype).to(tl.float32)
    normed = cast(u * tl.rsqrt(tl.sum(u * u) / D + eps) * gain, dtype)
    tl.store(x + row * D + d, normed, mask=inside)
    if GROUP > 0:
        rounded = fp8_device(normed.to(tl.float32)[None, :], GROUP, 0)
        tl.store(xq + row * D + d, cast(tl.reshape(rounded, (BLOCK,)), dtype), mask=inside)


@triton.jit(do_not_specialize=["T", "inputs"])
def open_site(
    streams,
    carried,
    sums,
    base,
    norm,
    x,
    xq,
    logits,
    pre,
    post,
    comb,
    inputs,
    T,
    D,
    eps,
    hc_eps,
    OWN: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first `inputs` programs make one row's input each; others R rows' coefficients each."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    program = tl.program_id(0)
    if program < inputs:
        _input(
            streams, carried, sums, base, norm, x, xq, program, D, eps, hc_eps,
            OWN, GROUP, S, M, SLOTS, SPLITS, BLOCK,
        )  # fmt: skip
    elif ITERATIONS > 0:
        _coefficients(
            sums, base, logits, pre, post, comb, (program - inputs) * R + tl.arange(0, R), T, D,
            eps, hc_eps, S, M, SLOTS, SPLITS, ITERATIONS,
        )  # fmt: skip
