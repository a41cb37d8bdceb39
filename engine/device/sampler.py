"""Logits to token ids.

Every draw is a pure function of a row's logits and of (seed, output index): no generator, no state.
So a request's tokens do not depend on its neighbours, on how its prompt was cut, on a preemption or
on how often the sampler ran before.

How: each token id gets a Gumbel number from a counter-based hash and the largest sum of scaled
logit and Gumbel number wins, which draws from the softmax exactly. The hash is splitmix64's (a
Weyl sequence through a 64-bit finaliser): one pass over (seed, index) makes a key on the host, a
second over (key, token id) makes a row's numbers on the device, in integer arithmetic that is the
same everywhere. Maths on probabilities is float64.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.api import EngineError, SamplingParams, TokenGuide, TokenLogprob
from engine.kernels.sampler import gumbel, nucleus

_MASK64 = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Draw:
    """What is to be drawn from one row of logits.

    Args:
        params: all but max_tokens and what ends a generation is read. A seed is needed where the
            temperature is above 0; its low 64 bits count.
        index: output index of the token: 0 for the first that is generated.
        forced: token to take whatever the logits say.
        allowed: int32 [ceil(V / 32)]: bit v % 32 of word v // 32 says whether token v may be drawn.
        generated: the tokens generated so far; read where the params penalise.
        guided: whether a guide will have a say in the draw after this one, too.
    """

    params: SamplingParams
    index: int
    forced: int | None = None
    allowed: NDArray[np.int32] | None = None
    generated: Sequence[int] = ()
    guided: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether something beside the logits has a say."""
        return self.forced is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether it draws from other logits than the model's."""
        return self.allowed is not None or self.params.moves_logits


@dataclass(frozen=True, slots=True)
class Sample:
    """One drawn token; the log-probability where the draw asked for it."""

    token_id: int
    logprob: TokenLogprob | None


def guided(draw: Draw, guide: TokenGuide, vocab_size: int) -> Draw:
    """Ask a guide for its say in a draw.

    Args:
        draw: whose `generated` is set.
        guide: of the request.
        vocab_size: V.

    Raises:
        EngineError: its answer is none of the three, it allows no token, names one that the model
            does not know, or its mask has another size.
        Exception: whatever the guide raises.
    """
    answer = guide.next(draw.generated)
    if answer is None:
        return draw
    # A buffer of larger elements would have the mask's length and more bytes; True is an int.
    if isinstance(answer, bool) or not isinstance(answer, int | bytes | bytearray):
        kind = type(answer).__name__
        raise EngineError(f"guide: expected None, a token id or the bytes of a mask, got {kind}")
    if isinstance(answer, int):
        if not 0 <= answer < vocab_size:
            raise EngineError(f"guide: expected a token id below {vocab_size}, got {answer}")
        return dataclasses.replace(draw, forced=answer)
    count = 4 * -(-vocab_size // 32)
    if len(answer) != count:
        raise EngineError(
            f"guide: expected a mask of {count} bytes for {vocab_size} tokens, got {len(answer)}"
        )
    allowed = np.frombuffer(answer, "<i4").astype(np.int32)
    if not _bits(allowed, vocab_size).any():
        raise EngineError("guide: expected at least one token that may come, got a mask of none")
    return dataclasses.replace(draw, allowed=allowed)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sample | None]:
    """Draw one token per row.

    Args:
        logits: float32 [B, V].
        draws: one per row.

    Returns:
        one sample per row; None for a row whose allowed logits have no finite maximum (a NaN, an
        infinity, or nothing but minus infinity), from which nothing can be drawn.
    """
    unmodified = logits
    if any(draw.changes_logits for draw in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            move_logits(row, draw)
            if draw.allowed is not None:
                row.masked_fill_(~_bits(draw.allowed, len(row)).to(row.device), -torch.inf)
    best, token_ids = logits.max(dim=-1)  # [B]; of equal ones the first; NaN where a row has one
    usable = torch.isfinite(best).tolist()
    random_rows = [i for i, draw in enumerate(draws) if draw.params.temperature > 0 and usable[i]]
    chosen: list[int] = token_ids.tolist()
    if random_rows:
        picked = _draw(logits, draws, random_rows)
        for i, token_id in zip(random_rows, picked, strict=True):
            chosen[i] = token_id
    found: list[Sample | None] = []
    for i, draw in enumerate(draws):
        if not usable[i]:
            found.append(None)
            continue
        token_id, top = chosen[i] if draw.forced is None else draw.forced, draw.params.top_logprobs
        logprob = None if top is None else logprob_of(unmodified[i], token_id, top)
        found.append(Sample(token_id, logprob))
    return found


def move_logits(row: Tensor, draw: Draw) -> None:
    """Apply a draw's penalties and biases, as the OpenAI API defines them.

    A token generated c times before loses `frequency_penalty * c`, and `presence_penalty` where c
    is above 0; then `logit_bias` is added. Sparse: ids without any of them are not touched.

    Args:
        row: logits, float32 [V]; changed in place.
        draw: whose.
    """
    params = draw.params
    moves = dict(params.logit_bias)
    if params.penalises:
        for token_id, count in Counter(draw.generated).items():
            loss = params.presence_penalty + params.frequency_penalty * count
            moves[token_id] = moves.get(token_id, 0.0) - loss
    if moves:
        ids = torch.tensor(list(moves), device=row.device)
        row[ids] += torch.tensor(list(moves.values()), dtype=row.dtype, device=row.device)


def draw_key(draw: Draw) -> int:
    """Hash (seed, output index) to the key of a row, as a signed 64-bit integer.

    Raises:
        ValueError: the draw has no seed.
    """
    if draw.params.seed is None:
        raise ValueError("a draw with a temperature needs a seed")
    return _signed(_mix(_mix(draw.params.seed + _WEYL) + (draw.index + 1) * _WEYL))


def _draw(logits: Tensor, draws: Sequence[Draw], rows: list[int]) -> list[int]:
    """Draw from the rows whose temperature is above 0."""
    device = logits.device
    params = [draws[i].params for i in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    scaled = logits[rows].double() / temperature[:, None]
    if cut := [k for k, p in enumerate(params) if p.top_p < 1]:
        top_p = torch.tensor([params[k].top_p for k in cut], dtype=torch.float64, device=device)
        scaled[cut] = scaled[cut].masked_fill(~nucleus(scaled[cut], top_p), -torch.inf)
    keys = torch.tensor([draw_key(draws[i]) for i in rows], device=device)
    picked: list[int] = scaled.add_(gumbel(keys, logits.shape[1])).argmax(dim=-1).tolist()
    return picked


def logprob_of(row: Tensor, token_id: int, top: int) -> TokenLogprob:
    """Log-probabilities of the unmodified distribution of one row.

    Args:
        row: logits, float32 [V].
        token_id: the chosen one.
        top: how many of the likeliest to list.
    """
    return logprobs_of(row[None], (token_id,), top)[0]


def logprobs_of(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of the unmodified distributions of some rows.

    Args:
        logits: float32 [N, V].
        token_ids: the chosen one of each.
        top: how many of the likeliest to list.
    """
    logprobs = logits.double().log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(1, chosen)[:, 0].tolist()
    if not top:
        return [TokenLogprob(value) for value in own]
    # By logit: distinct logits may round to one log-probability, and ties go to the lower id.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    best = logprobs.gather(1, ids).tolist()
    return [
        TokenLogprob(value, tuple(zip(row_ids, row_best, strict=True)))
        for value, row_ids, row_best in zip(own, ids.tolist(), best, strict=True)
    ]


def _bits(words: NDArray[np.int32], count: int) -> Tensor:
    """The first `count` bits of a token mask: bool [count]."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:count]
    return torch.from_numpy(bits.astype(bool))


def _mix(x: int) -> int:
    """Finalise as splitmix64 does; the twin on plain integers of the maths in `gumbel`."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """Read 64 bits as two's complement, the only 64-bit integer torch computes with."""
    return x - (1 << 64) if x >= 1 << 63 else x
