"""One speculative step: draft a block, verify it in one pass, keep what the model itself would say.

A sequence stands at position q with a token x that was drawn and not yet processed. The draft puts n
tokens after x; the backbone processes x and the draft as n + 1 rows; each row draws its token as a
plain step at that output index would, from the same numbers. The draft is taken as far as it agrees:
m tokens, and the token drawn after the last of them, so that a step yields m + 1 tokens and they are
token for token those of plain decoding, greedy or sampled. Rolling state keeps m + 1 rows (`Held`);
what a rejected row wrote beside it is never seen.

Source: model.md 2.11 for the draft, engine.md A5; agreement with the drawn token instead of a ratio
test is possible because a draw is a pure function of seed, index and logits (engine.device.sampler).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.rows import Rows
from engine.model.dspark import Dspark
from engine.model.fast import FastModel, Held, Pass

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool


@dataclass(frozen=True, slots=True)
class Wanted:
    """How each sequence's tokens are drawn, and when they end.

    Args:
        temperature: float64 [B].
        top_p: float64 [B].
        seeds: int64 [B].
        index: int32 [B], output index of the next token.
        left: int32 [B], tokens the sequence may still get; 0 takes none.
        ends: int64 [N], ids that end a sequence.
        ends_count: bool [B], whether they do in this sequence.
    """

    temperature: Tensor
    top_p: Tensor
    seeds: Tensor
    index: Tensor
    left: Tensor
    ends: Tensor
    ends_count: Tensor


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step yields.

    Args:
        ids: int64 [B, n + 1]; the first `counts` of each row are new tokens.
        counts: int32 [B], 0 for a sequence that may get none.
        accepted: int32 [B], drafted tokens among them.
        usable: bool [B], false where a counted row had no finite maximum.
    """

    ids: Tensor
    counts: Tensor
    accepted: Tensor
    usable: Tensor


class Speculator:
    """Speculative steps of a model with DSpark stages.

    Args:
        model: the backbone.
        draft: its stages.
        fixed_acceptance: FOR BENCHMARKS ONLY: yield this many tokens a step on average whether or
            not the draft agrees, so that speed can be measured with random weights; the tokens are
            then not those of the model. Between 1 and block_size + 1.

    Raises:
        ValueError: fixed_acceptance is out of range.
    """

    def __init__(
        self, model: FastModel, draft: Dspark, *, fixed_acceptance: float | None = None
    ) -> None:
        most = draft.block_size + 1
        if fixed_acceptance is not None and not 1 <= fixed_acceptance <= most:
            raise ValueError(f"fixed_acceptance: expected 1 to {most}, got {fixed_acceptance}")
        self._model = model
        self._draft = draft
        self._fixed = fixed_acceptance

    @property
    def rows_per_sequence(self) -> int:
        """Rows a step processes of each sequence: the drawn token and the draft."""
        return self._draft.block_size + 1

    def step(self, rows: Rows, pool: KVPool, wanted: Wanted) -> Verified:
        """Run one step; capturable.

        Args:
            rows: one row a sequence, the token that was drawn last; their tables cover
                rows_per_sequence positions from there.
            pool: memory of the requests, with rings for the draft's stages.
            wanted: how tokens are drawn.
        """
        drafted, _, _ = self._draft.propose(
            rows.ids, spread_rows(rows, self._draft.block_size), pool.draft
        )
        block = spread_rows(rows, self.rows_per_sequence)
        block.ids.copy_(torch.cat((rows.ids[:, None], drafted), 1).flatten())
        held = Held()
        state = Pass(block, pool, held)
        logits = self._model.run(state)
        self._draft.remember(state, pool.draft)
        size = self.rows_per_sequence
        offsets = torch.arange(size, dtype=torch.int32, device=rows.ids.device)
        drawn, usable = self._model.ops.sample(
            logits,
            wanted.temperature.repeat_interleave(size),
            wanted.top_p.repeat_interleave(size),
            wanted.seeds.repeat_interleave(size),
            (wanted.index[:, None] + offsets).flatten(),
        )
        found = verify(drafted, drawn.view(-1, size), usable.view(-1, size), wanted)
        if self._fixed is not None:
            found = self._fix(found, wanted)
        held.commit(found.counts)
        return found

    def _fix(self, found: Verified, wanted: Wanted) -> Verified:
        """Count by the output index alone: floor((i + 1) * a) - floor(i * a) tokens in step i."""
        assert self._fixed is not None
        step = torch.div(wanted.index, self._fixed).round()
        counts = ((step + 1) * self._fixed).floor() - (step * self._fixed).floor()
        counts = torch.minimum(counts.int(), wanted.left)
        return Verified(found.ids, counts, (counts - 1).clamp(min=0), found.usable)


def spread_rows(rows: Rows, size: int) -> Rows:
    """Rows of `size` positions for each sequence of a pass of one row a sequence.

    Args:
        rows: one row a sequence.
        size: rows of each, from its position on.

    Returns:
        rows whose ids are fresh memory, not yet meaningful.
    """
    batch = rows.num_sequences
    device = rows.positions.device
    offsets = torch.arange(size, dtype=torch.int32, device=device)
    order = torch.arange(batch, dtype=torch.int32, device=device)
    return dataclasses.replace(
        rows,
        ids=rows.ids.repeat_interleave(size),
        positions=(rows.positions[:, None] + offsets).flatten(),
        seq=order.repeat_interleave(size),
        first=order * size,
        lengths=torch.full_like(order, size),
        max_length=size,
        max_end=rows.max_end + size - 1,
    )


def verify(drafted: Tensor, drawn: Tensor, usable: Tensor, wanted: Wanted) -> Verified:
    """Take a draft as far as the model's own draws agree with it.

    Args:
        drafted: int64 [B, n].
        drawn: int64 [B, n + 1]: the token drawn after x, after the first drafted one, and so on.
        usable: bool [B, n + 1], whether it could be drawn.
        wanted: what ends a sequence.
    """
    agrees = (drafted == drawn[:, :-1]) & usable[:, :-1]
    # A token that ends the sequence, or cannot be drawn, is the last one.
    stops = torch.isin(drawn, wanted.ends) & wanted.ends_count[:, None]
    agrees = agrees & ~stops[:, :-1]
    accepted = agrees.int().cumprod(1).sum(1).int()
    counts = torch.minimum(accepted + 1, wanted.left)
    inside = torch.arange(drawn.shape[1], device=drawn.device) < counts[:, None]
    return Verified(
        ids=drawn,
        counts=counts.int(),
        accepted=torch.minimum(accepted, (counts - 1).clamp(min=0)).int(),
        usable=(usable | ~inside).all(1),
    )
