"""One speculative step: draft, verify in one pass, keep what the model itself would say.

A sequence stands at position q with a token x that was drawn and not yet processed. The drafter puts
n tokens after x; the backbone processes x and the draft as n + 1 rows; each row draws its token as a
plain step at that output index would, from the same numbers. The draft is taken as far as it agrees:
m tokens, and the token drawn after the last of them, so that a step yields m + 1 tokens and they are
token for token those of plain decoding, greedy or sampled. Rolling state keeps m + 1 rows (`Held`);
what a rejected row wrote beside it is never seen.

Drafted tokens are drawn with the numbers of the rows that will judge them, too. So where draft and
model are close, one and the same Gumbel number decides for both, and sampling is accepted nearly as
often as greedy decoding.

Source: model.md 2.8 and 2.11 for the drafts, engine.md A5; agreement with the drawn token instead of
a ratio test is possible because a draw is a pure function of seed, index and logits
(engine.device.sampler).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.accept import accept_torch, accept_triton
from engine.kernels.rows import Rows
from engine.model.checkpoint import Checkpoint
from engine.model.drafting import Drafter, Spread
from engine.model.dspark import Dspark
from engine.model.fast import FastModel
from engine.model.flow import Held, Pass
from engine.model.mtp import Mtp
from engine.model.packing import pack_dspark, pack_mtp
from engine.model.placement import Placement
from engine.model.sources import CheckpointSource
from engine.plan.layout import Drafting

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool


@dataclass(frozen=True, slots=True)
class Wanted:
    """How each sequence's tokens are drawn, and when they end.

    Args:
        temperature: float64 [B].
        top_p: float64 [B].
        seeds: int64 [B].
        index: int32 [B], output index of the next token; advanced by a step.
        control: int64 [B, 2 + M]: most tokens the sequence may get in a step, 0 for none; the first
            position that its table does not cover; then ids that end it (engine.kernels.accept).
        left: int64 [B], tokens it may still get; lowered by a step.
        mask: int32 [B, ceil(V / 32)], tokens that may be drawn first; None for all.
        forced: int32 [B], the first token, -1 for none; None for none at all.
    """

    temperature: Tensor
    top_p: Tensor
    seeds: Tensor
    index: Tensor
    control: Tensor
    left: Tensor
    mask: Tensor | None = None
    forced: Tensor | None = None


class Speculator:
    """Speculative steps of a model.

    Attributes:
        model: the backbone.

    Args:
        model: as above.
        drafter: drafts for it.
        fixed_acceptance: FOR BENCHMARKS ONLY: yield this many tokens a step on average whether or
            not the draft agrees, so that speed can be measured with random weights; the tokens are
            then not those of the model. Between 1 and num_tokens + 1.

    Raises:
        ValueError: fixed_acceptance is out of range.
    """

    def __init__(
        self, model: FastModel, drafter: Drafter, *, fixed_acceptance: float | None = None
    ) -> None:
        most = drafter.num_tokens + 1
        if fixed_acceptance is not None and not 1 <= fixed_acceptance <= most:
            raise ValueError(f"fixed_acceptance: expected 1 to {most}, got {fixed_acceptance}")
        self.model = model
        self._drafter = drafter
        self._fixed = fixed_acceptance
        self._spread = Spread()
        self._accept = accept_triton if model.ops.name == "triton" else accept_torch

    @property
    def num_tokens(self) -> int:
        """Tokens of a draft; a step processes one row more of each sequence."""
        return self._drafter.num_tokens

    def step(self, rows: Rows, pool: KVPool, wanted: Wanted, results: Tensor) -> Tensor:
        """Run one step; capturable.

        Args:
            rows: one row a sequence, the token that was drawn last. Its ids and positions, which are
                its starts, are written: what the next step begins with.
            pool: memory of the requests, with what the drafter needs.
            wanted: how tokens are drawn.
            results: int64 [N >= B, n + 2], written as engine.kernels.accept says.

        Returns:
            float32 [B * (n + 1), V], logits of all rows.
        """
        drafted = self._drafter.propose(rows, pool, self._pick(wanted))
        size = self.num_tokens + 1
        block = self._spread(rows, size, torch.cat((rows.ids[:, None], drafted), 1))
        held = Held()
        logits = self.model.run(Pass(block, pool, held))
        drawn, usable = self._draw(logits, wanted, block.seq, size)
        if self._fixed is not None:
            drafted = self._agree(drawn, wanted.index)
        counts = self._accept(
            drafted,
            drawn,
            usable,
            wanted.control,
            wanted.left,
            rows.ids,
            rows.positions,
            wanted.index,
            results,
        )
        held.commit(counts)
        return logits

    def rehearse(self, rows: Rows, pool: KVPool, wanted: Wanted, results: Tensor) -> None:
        """Call all that a step calls where kernels are only compiled: nothing they give is looked up.

        Args:
            rows: as for `step`, as all others.
            pool: as above.
            wanted: as above.
            results: as above.
        """
        pick, size, none = self._pick(wanted), self.num_tokens + 1, torch.zeros_like(rows.ids)

        def first(logits: Tensor, place: int) -> Tensor:
            pick(logits, place)
            return none

        drafted = self._drafter.propose(rows, pool, first)
        block = self._spread(rows, size, torch.cat((none[:, None], drafted), 1))
        held = Held()
        logits = self.model.run(Pass(block, pool, held))
        drawn, usable = self._draw(logits, wanted, block.seq, size)
        self._accept(
            drafted,
            drawn,
            usable,
            wanted.control,
            wanted.left,
            none,
            rows.positions,
            wanted.index,
            results,
        )
        held.commit(torch.zeros_like(rows.slots))

    def _pick(self, wanted: Wanted) -> Callable[[Tensor, int], Tensor]:
        """Draw drafted tokens as the rows that judge them will: at the output index of each place."""

        def pick(logits: Tensor, place: int) -> Tensor:
            index = wanted.index + place if place else wanted.index
            ids, _ = self.model.ops.sample(
                logits, wanted.temperature, wanted.top_p, wanted.seeds, index
            )
            return ids

        return pick

    def _draw(
        self, logits: Tensor, wanted: Wanted, seq: Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        """Draw a token after each row: ids and whether they count, [B, size] each.

        A sequence with a mask or a forced token gets one token alone, so both may stand for all its
        rows.
        """
        offsets = torch.arange(size, dtype=torch.int32, device=seq.device)
        mask, forced = wanted.mask, wanted.forced
        drawn, usable = self.model.ops.sample(
            logits,
            wanted.temperature[seq],
            wanted.top_p[seq],
            wanted.seeds[seq],
            (wanted.index[:, None] + offsets).flatten(),
            mask=None if mask is None else mask[seq],
            forced=None if forced is None else forced[seq],
        )
        return drawn.view(-1, size), usable.view(-1, size)

    def _agree(self, drawn: Tensor, index: Tensor) -> Tensor:
        """Drafts that agree as far as is fixed: floor((i + 1) * a) - floor(i * a) tokens in step i."""
        assert self._fixed is not None
        step = torch.div(index, self._fixed).round()
        counts = ((step + 1) * self._fixed).floor() - (step * self._fixed).floor()
        places = torch.arange(drawn.shape[1] - 1, device=drawn.device)
        return torch.where(places < (counts - 1)[:, None], drawn[:, :-1], -1)


def load_drafter(path: Path, model: FastModel, drafting: Drafting) -> Drafter:
    """Load a checkpoint's draft stages and have them take in what every pass sees.

    Args:
        path: folder of the checkpoint, checked already.
        model: its backbone, whose `drafter` is set.
        drafting: "dspark" or "mtp", which the checkpoint has.

    Raises:
        ValueError: drafting is "off".
    """
    device = model.weights.embed.device
    source = CheckpointSource(Checkpoint(path), device, model.dtype)
    placement = Placement(device=device)
    if drafting == "dspark":
        stages = pack_dspark(model.config, source, placement, plain=model.dtype)
        model.drafter = Dspark(model, stages)
    elif drafting == "mtp":
        model.drafter = Mtp(model, pack_mtp(model.config, source, placement, plain=model.dtype))
    else:
        raise ValueError(f"drafting: expected dspark or mtp, got {drafting}")
    return model.drafter
