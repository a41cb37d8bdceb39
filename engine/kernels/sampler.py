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
