"""Logits to token ids on the device, fit for a captured graph.

The same draws as `engine.device.sampler` makes, whose docstring explains them: a Gumbel number per
(seed, output index, token id) from a counter-based hash, and the largest sum of scaled logit and
Gumbel number wins. Maths on probabilities is float64. Tokens may be ruled out by a bitmask (a
grammar) or decided beforehand (forced).

Draw for draw equal to that sampler, except where two sums agree to the last bits of a float64
logarithm, or where the mass before a token meets top_p to within the rounding of a sum over V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.overlap import await_previous, begin_next, overlapping
from engine.kernels.triton_compat import tl, triton

WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)
#: (k + 0.5) / 2 ** GUMBEL_BITS is exact in float64 and never 0 or 1.
GUMBEL_BITS = 52

# ---------------------------------------------------------------- torch


def sample_torch(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    index: Tensor,
    *,
    mask: Tensor | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: float32 [B, V].
        temperature: float64 [B]; 0 takes the likeliest token, of equal ones the lowest id.
        top_p: float64 [B] in (0, 1]; read where the temperature is above 0.
        seeds: int64 [B], low 64 bits of each seed.
        index: integers [B], output index of the token.
        mask: int32 [B, ceil(V / 32)]; bit v % 32 of word v // 32 says whether token v may be
            drawn. None allows all.
        forced: int32 [B], the token to take whatever the logits say; -1 or None draws.

    Returns:
        ids: int64 [B]; 0 for rows that are not usable and not forced.
        usable: bool [B]; false for a row whose allowed logits have no finite maximum (a NaN, an
            infinity, or nothing but minus infinity), from which nothing can be drawn.
    """
    vocab = logits.shape[1]
    if mask is not None:
        ids = torch.arange(vocab, device=logits.device)
        allowed = (mask[:, ids // 32] >> (ids % 32).int()) & 1
        logits = logits.masked_fill(allowed == 0, -torch.inf)
    best, greedy = logits.max(-1)
    usable = best.isfinite()
    warm = temperature > 0
    scaled = logits.double() / torch.where(warm, temperature, 1)[:, None]
    scaled = scaled.masked_fill(~usable[:, None], 0)
    kept = nucleus(scaled, top_p) | (top_p >= 1)[:, None]
    drawn = scaled.masked_fill(~kept, -torch.inf) + gumbel(draw_keys(seeds, index), vocab)
    ids = torch.where(warm, drawn.argmax(-1), greedy)
    ids = torch.where(usable, ids, 0)
    if forced is not None:
        ids = torch.where(forced >= 0, forced.long(), ids)
    return ids, usable


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens that holds the mass top_p.

    Args:
        logits: float64 [B, V], scaled by the temperature.
        top_p: float64 [B], in (0, 1].

    Returns:
        bool [B, V], true for tokens that may be drawn: at least one per row; of equally likely
        ones the lower id is kept first.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    kept = probs.cumsum(dim=-1) - probs < top_p[:, None]  # mass of those before
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def draw_keys(seeds: Tensor, index: Tensor) -> Tensor:
    """Hash (seed, output index) [B] to the keys of rows, int64 [B]."""
    return mix(mix(seeds + WEYL) + (index.long() + 1) * WEYL)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Give each token id of each row its Gumbel number.

    Args:
        keys: int64 [B], from `draw_keys`.
        vocab_size: V.

    Returns:
        float64 [B, V].
    """
    ids = torch.arange(1, vocab_size + 1, device=keys.device)
    bits = mix(keys[:, None] + ids * WEYL)
    uniform = shift_right(bits, 64 - GUMBEL_BITS).double().add_(0.5).mul_(2.0**-GUMBEL_BITS)
    return uniform.log_().neg_().log_().neg_()


def mix(x: Tensor) -> Tensor:
    """Finalise 64 bits as splitmix64 does."""
    x = (x ^ shift_right(x, 30)) * MIX1
    x = (x ^ shift_right(x, 27)) * MIX2
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift 64 bits without carrying the sign in, as an unsigned integer would."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# ---------------------------------------------------------------- Triton
# The nucleus needs no sort. The winner among all tokens is the winner among the nucleus if it lies
# in it, which is so if the mass of the tokens before it is below top_p. If it does not, the nucleus
# lies wholly before it: look for the winner among the tokens before it, and so on. A first look
# (_look) covers all tokens; rounds (_weigh) weigh what comes before the last winner and find the
# next one meanwhile; if those do not suffice, one program goes on alone (_settle).

_WEYL = tl.constexpr(WEYL + (1 << 64))
_MIX1 = tl.constexpr(MIX1 + (1 << 64))
_MIX2 = tl.constexpr(MIX2 + (1 << 64))
_UNUSED = tl.constexpr(64 - GUMBEL_BITS)
_STEP = tl.constexpr(2.0**-GUMBEL_BITS)
#: Tokens of a program.
BLOCK = 1024
#: Rounds that all programs make together: at top_p = 0.9 one draw in 200 needs more.
ROUNDS = 2
#: Programs of the rounds, about as many as run at once.
_PROGRAMS = 2048


@triton.jit
def _mix(x):
    """Finalise 64 bits, uint64."""
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ (x >> 31)


@triton.jit
def _row_key(seeds, index, b):
    """Draw key of row b, uint64."""
    seed = tl.load(seeds + b).to(tl.uint64, bitcast=True)
    count = tl.load(index + b).to(tl.uint64) + 1
    return _mix(_mix(seed + _WEYL) + count * _WEYL)


@triton.jit
def _logits(logits, mask, b, first, V, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Logits of BLOCK tokens, -inf where ruled out, and the tokens; `first` is a multiple of 32."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * V + ids, mask=ids < V, other=float("-inf"))
    if HAS_MASK:
        words = tl.cdiv(V, 32)
        place = first // 32 + tl.arange(0, BLOCK // 32)  # each word is loaded once
        word = tl.load(mask + b * words + place, mask=place < words, other=0)
        allowed = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
        x = tl.where(tl.reshape(allowed, (BLOCK,)) != 0, x, float("-inf"))
    return x, ids


@triton.jit
def _sums(x, ids, temperature, key):
    """Scaled logits and their sums with Gumbel numbers, float64."""
    bits = _mix(key + (ids + 1).to(tl.uint64) * _WEYL)
    uniform = ((bits >> _UNUSED).to(tl.float64) + 0.5) * _STEP
    scaled = x.to(tl.float64) / temperature
    return scaled, scaled - tl.log(-tl.log(uniform))


@triton.jit
def _better(value, token, other, other_token):
    """Of two (value, id) the one with the larger value, then the lower id; NaN is above all."""
    first = (value > other) | ((value == other) & (token < other_token)) | (value != value)
    return tl.where(first, value, other), tl.where(first, token, other_token)


@triton.jit
def _winner(values, ids):
    """Largest value, and of those that have it the lowest id; NaN if there is one."""
    return tl.reduce((values, ids), 0, _better)


@triton.jit
def _look(
    logits, temperature, top_p, seeds, index, mask, high, high_id, drawn, drawn_id, mass, sums, V,
    parts,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (c, b): tokens c * BLOCK and after of row b."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    c, b = tl.program_id(0), tl.program_id(1)
    x, ids = _logits(logits, mask, b, c * BLOCK, V, HAS_MASK, BLOCK)
    best, best_id = _winner(x, ids)
    at = b * parts + c
    tl.store(high + at, best)
    tl.store(high_id + at, best_id)
    heat = tl.load(temperature + b)
    if heat > 0:
        x = tl.where(x == x, x, float("-inf"))
        scaled, value = _sums(x, ids, heat, _row_key(seeds, index, b))
        top, top_id = _winner(value, ids)
        tl.store(drawn + at, top)
        tl.store(drawn_id + at, top_id)
        if tl.load(top_p + b) < 1:
            # Relative to the chunk's own maximum; a chunk without any token has no mass.
            own = tl.where(tl.abs(best) < float("inf"), best, 0.0).to(tl.float64) / heat
            tl.store(mass + at, tl.sum(tl.exp(scaled - own), 0))
            tl.store(sums + b.to(tl.int64) * V + ids, value, mask=ids < V)


@triton.jit
def _is_fit(high, b, parts, PARTS: tl.constexpr):
    """Whether a row's maximum is finite and no part has a NaN."""
    part = tl.arange(0, PARTS)
    peak = tl.load(high + b * parts + part, mask=part < parts, other=float("-inf"))
    broken = tl.sum(((peak != peak) | (peak == float("inf"))).to(tl.int32), 0) > 0
    return (tl.sum((peak > float("-inf")).to(tl.int32), 0) > 0) & (broken == 0)


@triton.jit
def _logit(logits, b, token, V):
    """Logit of one token that the mask allows."""
    return tl.load(logits + b.to(tl.int64) * V + token)


@triton.jit
def _total(high, mass, b, parts, heat, PARTS: tl.constexpr):
    """Scaled maximum of a row and its mass relative to it, float64, from the parts of `_look`."""
    part = tl.arange(0, PARTS)
    peak = tl.load(high + b * parts + part, mask=part < parts, other=float("-inf"))
    share = tl.load(mass + b * parts + part, mask=part < parts, other=0.0)
    level = tl.max(peak, 0).to(tl.float64) / heat
    scaled = tl.where(peak == float("-inf"), level, peak.to(tl.float64) / heat)
    share = tl.where(peak == float("-inf"), 0.0, share)
    return level, tl.sum(share * tl.exp(scaled - level), 0)


@triton.jit
def _before(
    logits, mask, sums, b, first, V, heat, level, limit, limit_id, HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass, relative to `level`, of BLOCK tokens that come before one, and the winner among them."""
    x, ids = _logits(logits, mask, b, first, V, HAS_MASK, BLOCK)
    earlier = (x > limit) | ((x == limit) & (ids < limit_id))
    value = tl.load(sums + b.to(tl.int64) * V + ids, mask=earlier, other=float("-inf"))
    scaled = x.to(tl.float64) / heat
    mass = tl.sum(tl.where(earlier, tl.exp(scaled - level), 0.0), 0)
    best, best_id = _winner(value, ids)
    return mass, best, best_id


@triton.jit
def _part_winner(values, value_ids, b, parts, PARTS: tl.constexpr):
    """Winner of a row's parts."""
    part = tl.arange(0, PARTS)
    value = tl.load(values + b * parts + part, mask=part < parts, other=float("-inf"))
    ids = tl.load(value_ids + b * parts + part, mask=part < parts, other=2147483647)
    return _winner(tl.where(value == value, value, float("-inf")), ids)


@triton.jit
def _ahead(before, b, parts, PARTS: tl.constexpr):
    """Mass before a winner: the sum of what each part has."""
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(before + b * parts + part, mask=part < parts, other=0.0), 0)


@triton.jit
def _weigh(
    logits, temperature, top_p, mask, high, drawn, drawn_id, mass, before, sums, V, parts,
    ROUND: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, b): what of every num_programs(0)-th chunk comes before the winner of a round.

    Round ROUND found it in row b.
    """
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    b = tl.program_id(1)
    size = tl.num_programs(1) * parts
    heat, wanted = tl.load(temperature + b), tl.load(top_p + b)
    if (heat > 0) & (wanted < 1):
        undecided = _is_fit(high, b, parts, PARTS)
        if undecided:
            level, total = _total(high, mass, b, parts, heat, PARTS)
            for done in tl.static_range(ROUND):
                undecided &= _ahead(before + done * size, b, parts, PARTS) >= wanted * total
            if undecided:
                from_round = ROUND * size
                _value, limit_id = _part_winner(
                    drawn + from_round, drawn_id + from_round, b, parts, PARTS
                )
                limit = _logit(logits, b, limit_id, V)
                for c in range(tl.program_id(0), parts, tl.num_programs(0)):
                    share, best, best_id = _before(
                        logits, mask, sums, b, c * BLOCK, V, heat, level, limit, limit_id,
                        HAS_MASK, BLOCK,
                    )  # fmt: skip
                    at = b * parts + c
                    tl.store(before + from_round + at, share)
                    tl.store(drawn + from_round + size + at, best)
                    tl.store(drawn_id + from_round + size + at, best_id)


@triton.jit
def _settle(
    logits, temperature, top_p, mask, forced, high, high_id, drawn, drawn_id, mass, before, sums,
    out, usable, V, parts,
    ROUNDS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_FORCED: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program b: the token of row b."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    b = tl.program_id(0)
    size = tl.num_programs(0) * parts
    heat, wanted = tl.load(temperature + b), tl.load(top_p + b)
    _peak, token = _part_winner(high, high_id, b, parts, PARTS)
    fit = _is_fit(high, b, parts, PARTS)
    if fit & (heat > 0):
        _value, token = _part_winner(drawn, drawn_id, b, parts, PARTS)
        if wanted < 1:
            level, total = _total(high, mass, b, parts, heat, PARTS)
            ahead = _ahead(before, b, parts, PARTS)
            _value, follower = _part_winner(drawn + size, drawn_id + size, b, parts, PARTS)
            for done in tl.static_range(1, ROUNDS):
                if ahead >= wanted * total:
                    token = follower
                    ahead = _ahead(before + done * size, b, parts, PARTS)
                    to = (done + 1) * size
                    _value, follower = _part_winner(drawn + to, drawn_id + to, b, parts, PARTS)
            while ahead >= wanted * total:
                token = follower
                limit = _logit(logits, b, token, V)
                ahead = tl.zeros_like(ahead)
                best = tl.full((), float("-inf"), tl.float64)
                for first in range(0, V, BLOCK):
                    portion, value, value_id = _before(
                        logits, mask, sums, b, first, V, heat, level, limit, token, HAS_MASK,
                        BLOCK,
                    )  # fmt: skip
                    ahead += portion
                    follower = tl.where(value > best, value_id, follower)
                    best = tl.maximum(best, value)
    token = tl.where(fit, token, 0).to(tl.int64)
    if HAS_FORCED:
        force = tl.load(forced + b)
        token = tl.where(force >= 0, force.to(tl.int64), token)
    tl.store(out + b, token)
    tl.store(usable + b, fit.to(tl.int8))


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    index: Tensor,
    *,
    mask: Tensor | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `sample_torch`; ROUNDS + 2 launches, whose work is what the rows' parameters need."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    padded = triton.next_power_of_2(parts)

    def scratch(rounds: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rounds, rows, parts), dtype=dtype, device=logits.device)

    wide, narrow = torch.float64, torch.int32
    high, high_id = scratch(1, torch.float32), scratch(1, narrow)
    drawn, drawn_id = scratch(ROUNDS + 1, wide), scratch(ROUNDS + 1, narrow)
    mass, before = scratch(1, wide), scratch(ROUNDS, wide)
    sums = torch.empty((rows, vocab), dtype=wide, device=logits.device)  # used by nuclei only
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    usable = torch.empty(rows, dtype=torch.bool, device=logits.device)
    masked = {"HAS_MASK": mask is not None, **overlapping(logits.device, rows)}
    _look[(parts, rows)](
        logits, temperature, top_p, seeds, index, mask, high, high_id, drawn, drawn_id, mass, sums,
        vocab, parts, BLOCK=BLOCK, num_warps=4, **masked,
    )  # fmt: skip
    for done in range(ROUNDS):
        # Mostly there is nothing to do: no more programs than run at once.
        _weigh[(max(1, min(parts, _PROGRAMS // rows)), rows)](
            logits, temperature, top_p, mask, high, drawn, drawn_id, mass, before, sums, vocab,
            parts, ROUND=done, BLOCK=BLOCK, PARTS=padded, num_warps=4, **masked,
        )  # fmt: skip
    _settle[(rows,)](
        logits, temperature, top_p, mask, forced, high, high_id, drawn, drawn_id, mass, before,
        sums, ids, usable.view(torch.int8), vocab, parts,
        ROUNDS=ROUNDS, HAS_FORCED=forced is not None, BLOCK=4 * BLOCK, PARTS=padded, num_warps=16,
        **masked,
    )  # fmt: skip
    return ids, usable
