"""Torch twins of the model's operations: the specification any faster kernel is compared with.

Pure functions of tensors: no weights, pools or configuration objects. T counts rows (tokens), S
residual streams, H heads, D the head width, E experts or entries. Floating tensors share one dtype
(float32, or float64 in tests) unless a linear's weight says otherwise. Source: model.md 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# ---------------------------------------------------------------- linear and norm


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [..., K] by weight [N, K] transposed, in the weight's dtype; the result has x's."""
    if x.dtype == weight.dtype:
        return F.linear(x, weight)
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Give x * weight / sqrt(mean(x^2) + eps) over the last dimension; a zero row stays zero."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


# ---------------------------------------------------------------- rotary (model.md 2.3)


def rope_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_len: int = 0,
    beta_fast: float = 0.0,
    beta_slow: float = 0.0,
) -> Tensor:
    """Angles per position, float64 [dim / 2]; YaRN where factor is not 1.

    YaRN divides low frequencies by `factor`, keeps high ones, and blends between the two
    dimensions that turn beta_fast and beta_slow times over original_len tokens. There is no
    attention factor.
    """
    freqs = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if factor == 1.0:
        return freqs

    def dimension(turns: float) -> float:
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(beta_fast)), 0)
    high = min(math.ceil(dimension(beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    divided = ramp.clamp(0, 1)
    return freqs / factor * divided + freqs * (1 - divided)


def rope_turns(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers exp(i * position * freq).

    Args:
        positions: int64 [T].
        freqs: float64 [R]; angles are exact to far beyond any context.
        dtype: of the tensors to be rotated.

    Returns:
        complex [T, R].
    """
    angles = torch.outer(positions.to(freqs.dtype), freqs)
    turns = torch.polar(torch.ones_like(angles), angles)
    return turns.to(torch.complex128 if dtype == torch.float64 else torch.complex64)


def rope_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate, in place, the last 2 * R dimensions of x [T, (heads,) D] as adjacent pairs.

    Args:
        x: contiguous in its last dimension; D is even.
        turns: complex [T, R]; its conjugate undoes the rotation.
    """
    dims = turns.shape[-1]
    tail = x[..., -2 * dims :]
    pairs = torch.view_as_complex(tail.view(*tail.shape[:-1], dims, 2))
    pairs.mul_(turns if x.dim() == 2 else turns[:, None])
    return x


# ---------------------------------------------------------------- residual streams (model.md 2.2)


@dataclass(frozen=True, slots=True)
class SinkhornTables:
    """Constants for S streams, built once per model.

    Args:
        over_last: [S*S, S*S]; flat @ this = every element replaced by the sum over its last axis.
        over_first: the same for the first axis.
        eps: [S*S], hc_eps in every place.
        gain: [2S]: 1 for pre, 2 for post.
        floor: [2S]: hc_eps for pre, 0 for post.
    """

    over_last: Tensor
    over_first: Tensor
    eps: Tensor
    gain: Tensor
    floor: Tensor

    @classmethod
    def make(
        cls, streams: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> SinkhornTables:
        """Build them."""
        one, full = torch.eye(streams), torch.ones(streams, streams)
        gain = torch.tensor([1.0] * streams + [2.0] * streams)
        floor = torch.tensor([eps] * streams + [0.0] * streams, dtype=torch.float64)
        tables = (
            torch.kron(one, full),
            torch.kron(full, one),
            torch.full((streams * streams,), eps, dtype=torch.float64),
            gain,
            floor,
        )
        return cls(*(t.to(dtype=dtype, device=device) for t in tables))


def sinkhorn(logits: Tensor, iterations: int, tables: SinkhornTables) -> Tensor:
    """Turn logits [T, S, S] into nearly doubly stochastic matrices.

    Softmax over the last axis plus eps and one division by the sums over the first axis count as
    the first iteration; each further one divides by the sums over the last, then the first axis.
    So the first axis sums to 1 and the last only nearly: the weights were trained with exactly
    this many iterations.
    """
    rows = logits.shape[0]
    c = torch.add(logits.softmax(-1).view(rows, -1), tables.eps)
    c.div_(torch.addmm(tables.eps, c, tables.over_first))
    for _ in range(iterations - 1):
        c.div_(torch.addmm(tables.eps, c, tables.over_last))
        c.div_(torch.addmm(tables.eps, c, tables.over_first))
    return c.view_as(logits)


def stream_mixes(streams: Tensor, fn: Tensor, base: Tensor, eps: float) -> Tensor:
    """Project normalised streams [T, S, d] onto the mixing logits [T, M].

    Args:
        streams: R.
        fn: [M, S * d], rows already multiplied by their scale.
        base: [M].
        eps: of the norm.
    """
    z = streams.flatten(1)
    rho = torch.rsqrt(z.square().mean(-1, keepdim=True).add_(eps))
    return torch.addcmul(base, F.linear(z, fn), rho)


def hc_coefficients(
    mixes: Tensor, streams: int, iterations: int, tables: SinkhornTables
) -> tuple[Tensor, Tensor, Tensor]:
    """Split mixing logits [T, S * (S + 2)] into (pre [T, S], post [T, S], comb [T, S, S])."""
    gates = torch.addcmul(tables.floor, mixes[:, : 2 * streams].sigmoid(), tables.gain)
    comb = mixes[:, 2 * streams :].reshape(-1, streams, streams)
    return gates[:, :streams], gates[:, streams:], sinkhorn(comb, iterations, tables)


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of streams [T, S, d] by [T, S]: [T, d]."""
    return torch.bmm(weights[:, None], streams).squeeze(1)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams R'_j = post_j * y + sum_i comb[i, j] * R_i: [T, S, d]."""
    return torch.baddbmm(post[:, :, None] * y[:, None], comb.transpose(1, 2), streams)


# ---------------------------------------------------------------- compressor (model.md 2.5)


def pool_entries(members: Tensor, overlap: bool) -> Tensor:
    """Pool groups of rows into entries by a softmax per channel.

    Args:
        members: [N, rows, 2 * width], kv | gate score (-inf for an absent row). With overlap the
            first half of the rows is the group before, which gives its A channels, the second
            half the group itself, which gives its B channels; width is 2 * D.
        overlap: V4's CSA form.

    Returns:
        [N, D].
    """
    kv, score = members.chunk(2, -1)
    if overlap:
        half, dim = members.shape[1] // 2, kv.shape[-1] // 2
        kv = torch.cat((kv[:, :half, :dim], kv[:, half:, dim:]), 1)
        score = torch.cat((score[:, :half, :dim], score[:, half:, dim:]), 1)
    pooled: Tensor = (kv * score.softmax(1)).sum(1)
    return pooled


def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Orthonormal Hadamard matrix [dim, dim] (Sylvester order); dim is a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.mul_(dim**-0.5)


# ---------------------------------------------------------------- indexer (model.md 2.6, 2.9)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of weight * relu(q . k).

    Args:
        q: [T, H, D].
        keys: [E, D] for all rows, or [T, E, D] for each its own.
        weights: [T, H], scaled; may be negative.

    Returns:
        [T, E].
    """
    heads = torch.matmul(q, keys.transpose(-1, -2)).relu_()
    return torch.bmm(weights[:, None], heads).squeeze(1)


def select_entries(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Best entries of each row, ties to the lowest index; -inf is never chosen.

    Args:
        scores: [T, E].
        k: most entries to choose.

    Returns:
        int64 [T, K] ascending entry indices and bool [T, K] which of them are real; K is
        min(k, E).
    """
    ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
    best = ordered.indices[:, :k]
    chosen = best.sort(-1).values
    return chosen, scores.gather(-1, chosen) > -math.inf


def candidate_entries(scores: Tensor, counts: Tensor, group: int, k: int) -> Tensor:
    """Entries of the k best groups of `group` consecutive entries, as a mask [T, E].

    A group scores its maximum. The group of the newest visible entry is always among the k; one
    with nothing visible never is. Ties go to the lowest group.

    Args:
        scores: [T, E], -inf where invisible.
        counts: int64 [T], visible entries of each row.
        group: entries per group.
        k: groups kept.
    """
    rows, entries = scores.shape
    padded = F.pad(scores, (0, -entries % group), value=-math.inf)
    best = padded.view(rows, -1, group).amax(-1)
    newest = ((counts - 1).clamp(min=0) // group)[:, None]
    forced = torch.where((counts > 0)[:, None], math.inf, -math.inf).to(scores.dtype)
    best = best.scatter(1, newest, forced)
    chosen, real = select_entries(best, k)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, real)
    return kept.repeat_interleave(group, 1)[:, :entries]


# ---------------------------------------------------------------- attention (model.md 2.4)


def sink_attention(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Attention of many heads over one set of keys that are the values too, with a sink.

    Args:
        q: [B, M, H, D], already scaled.
        keys: [B, 1 + N, D]; row 0 is zero and stands for the sink.
        mask: [B, M, 1 + N]: 0 or -inf to add; column 0 is 0.
        sink: [H] logit of the sink, which takes probability and gives no value.

    Returns:
        [B, M, H, D].
    """
    batch, rows, heads, dim = q.shape
    bias = mask[:, :, None].repeat(1, 1, heads, 1)
    bias[..., 0] = sink
    flat = bias.view(batch, rows * heads, -1)
    scores = torch.baddbmm(flat, q.reshape(batch, -1, dim), keys.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), keys).view(q.shape)


def grouped_output(o: Tensor, wo_a: Tensor) -> Tensor:
    """Project the heads of each contiguous group together.

    Args:
        o: attention output [T, H, D].
        wo_a: [G, R, H / G * D], one matrix per group.

    Returns:
        [T, G * R].
    """
    rows, groups = o.shape[0], wo_a.shape[0]
    by_group = o.reshape(rows, groups, -1).transpose(0, 1).to(wo_a.dtype)
    z = torch.bmm(by_group, wo_a.transpose(1, 2)).transpose(0, 1)
    return z.reshape(rows, -1).to(o.dtype)


# ---------------------------------------------------------------- experts (model.md 2.7)


def sqrt_softplus(logits: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))), through float64: no overflow, and no zero for very negative x."""
    return F.softplus(logits.double()).sqrt().to(logits.dtype)


def route(scores: Tensor, experts: Tensor, scaling: float) -> Tensor:
    """Weights [T, K] of the chosen experts [T, K]: their scores, normalised, times scaling."""
    chosen = scores.gather(-1, experts)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit), times the routing weight [...] if given.

    Args:
        gate_up: [..., 2 * I], gate first.
        limit: swiglu_limit.
        weights: one per row; the product is what FP8 rounding before w2 sees.
    """
    gate, up = gate_up.chunk(2, -1)
    hidden = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return hidden if weights is None else hidden * weights[..., None]


# ---------------------------------------------------------------- Engram (model.md 2.10)


def engram_gate(streams: Tensor, keys: Tensor, weight: Tensor, eps: float) -> Tensor:
    """How much of the looked-up value each stream takes, in (0, 1).

    Args:
        streams: R [T, S, d].
        keys: [T, S, d].
        weight: q weight times k weight [S, d].
        eps: of both norms.

    Returns:
        [T, S].
    """
    delta = (streams * weight * keys).sum(-1)
    delta = delta * torch.rsqrt(streams.square().mean(-1) + eps)
    delta = delta * torch.rsqrt(keys.square().mean(-1) + eps) * streams.shape[-1] ** -0.5
    return torch.sigmoid(torch.sign(delta) * delta.abs().clamp(min=1e-6).sqrt())


def segments(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index, first, last + 1) of every non-empty run when runs of `sizes` follow each other."""
    runs, first = [], 0
    for index, size in enumerate(sizes):
        if size:
            runs.append((index, first, first + size))
        first += size
    return runs
