"""MTP: a block of the model's own kind that guesses one token further (model.md 2.8).

At position p, stage 0 takes the backbone's streams R_p before the last mixing and the token at p + 1,
runs one window block over

    x_s = h_proj RMSNorm(R_p,s) + e_proj RMSNorm(embed(token p + 1))

and its own last mixing and norm before the shared head give logits for p + 2. Stage k takes stage
k - 1's streams and the token at p + k + 1, and is asked for p + k + 2: with n stages a draft has n
tokens. So stage k processes position p when the token at p + k + 1 arrives: a pass whose rows stand
at t has it process positions t - k - 1, of which the first needs the streams that the level below
gave a row earlier. Those are *carried* from pass to pass, one row a slot and stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.rows import Rows
from engine.model.drafting import Pick, Spread, head_logits, window_attention
from engine.model.packed import PackedMtp

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool
    from engine.model.fast import FastModel
    from engine.model.flow import Flow, Pass


class Mtp:
    """The MTP stages of a model; immutable. A Drafter.

    Attributes:
        num_tokens: of a draft: one for each stage.
        taps: none.

    Args:
        model: the backbone.
        stages: weights.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: FastModel, stages: tuple[PackedMtp, ...]) -> None:
        self._model = model
        self._stages = stages
        self._spread = Spread()
        self.num_tokens = len(stages)

    def remember(self, state: Pass, flow: Flow) -> None:
        """Run every stage over the positions whose tokens this pass has brought."""
        m, rows, pool, site = self._model, state.rows, state.pool, flow.site
        below = m.ops.hc_out(flow.streams, flow.parts, site.post, site.comb)
        order = torch.arange(rows.num_rows, device=below.device)
        seq = rows.seq.long()
        begins = (order == rows.first[seq])[:, None, None]
        slots = rows.slots[seq].long()
        for number, (stage, ring) in enumerate(zip(self._stages, pool.draft, strict=True)):
            carry = pool.carry[number]
            # Of the row before, which may have been the last one of the pass before.
            inputs = torch.where(begins, carry[slots].view_as(below), below.roll(1, 0))
            state.store(partial(_store_carry, below, rows, carry))
            own, missing = _earlier(rows, number + 1)
            below, keys = self._block(stage, inputs, rows.ids, own, ring)
            state.store(partial(_store_keys, m.ops.store_window, keys, own, ring, missing))

    def propose(self, rows: Rows, pool: KVPool, pick: Pick) -> Tensor:
        """Draft a token with each stage; see engine.model.drafting."""
        m, slots, batch = self._model, rows.slots.long(), rows.num_sequences
        tokens: list[Tensor] = [rows.ids]
        below: Tensor | None = None  # [B, number, S, d]
        for number, (stage, ring) in enumerate(zip(self._stages, pool.draft, strict=True)):
            size = number + 1
            inputs = pool.carry[number][slots].view(batch, 1, m.config.hc_mult, -1)
            if below is not None:
                inputs = torch.cat((inputs, below), 1)
            own = self._spread(rows, size, torch.stack(tokens, 1), back=size)
            out, _ = self._block(stage, inputs.flatten(0, 1), own.ids, own, ring)
            below = out.view(batch, size, *out.shape[1:])
            newest = below[:, -1].contiguous()
            logits = head_logits(m, newest, stage.norm, stage.hc_head, None)
            tokens.append(pick(logits, number))
        return torch.stack(tokens[1:], 1)

    def _block(
        self, stage: PackedMtp, streams: Tensor, ids: Tensor, rows: Rows, ring: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a stage.

        Args:
            stage: its weights.
            streams: of the level below [T, S, d].
            ids: int64 [T], the tokens that the stage is told.
            rows: the positions it processes.
            ring: of the stage.

        Returns:
            its streams [T, S, d], and its window keys [T, D].
        """
        m, w = self._model, stage.layer
        eps, group = m.config.rms_norm_eps, m.act_group
        embedded = F.embedding(ids, m.weights.embed).to(m.dtype)
        (e,) = m.ops.norm_linear(embedded, stage.enorm, eps, [stage.e_proj], act_group=group)
        flat = streams.reshape(-1, streams.shape[-1])
        (h,) = m.ops.norm_linear(flat, stage.hnorm, eps, [stage.h_proj], act_group=group)
        mixed = h.view_as(streams) + e[:, None]
        site = m.open_site(w.attn_site, mixed, m.first_pre(mixed))
        parts, keys = window_attention(m, w, site, rows, ring)
        mixed, site = m.turn(mixed, parts, site, w.ffn_site)
        parts = m.run_experts(w.moe, site, rows, None, m.config.num_experts_per_tok)
        return m.ops.hc_out(mixed, parts, site.post, site.comb), keys


def _earlier(rows: Rows, back: int) -> tuple[Rows, Tensor]:
    """The rows of a pass at positions `back` earlier.

    Rows that would stand before position 0 exist in no sequence: they come before their sequence's
    first row, attend what is finite and are not stored.

    Returns:
        the rows, and how many each sequence lacks, int32 [G].
    """
    missing = (back - rows.starts).clamp(min=0)
    missing = torch.minimum(missing, rows.lengths)
    own = dataclasses.replace(
        rows,
        positions=(rows.positions - back).clamp(min=0),
        starts=(rows.starts - back).clamp(min=0),
        first=(rows.first + missing).clamp(max=rows.num_rows - 1),
        lengths=rows.lengths - missing,
        spans=(),
    )
    return own, missing


def _store_keys(
    store_window: Callable[..., None],
    keys: Tensor,
    rows: Rows,
    ring: Tensor,
    missing: Tensor,
    lengths: Tensor | None = None,
) -> None:
    """Store the window keys of rows that exist; `lengths` counts those that do not, too."""
    counted = None if lengths is None else (lengths - missing).clamp(min=0)
    store_window(keys, rows, ring, lengths=counted)


def _store_carry(below: Tensor, rows: Rows, carry: Tensor, lengths: Tensor | None = None) -> None:
    """Keep the streams of each sequence's last row that counts; slot 0 takes what is not kept."""
    counted = rows.lengths if lengths is None else lengths
    last = (rows.first + counted - 1).clamp(min=0).long()
    slots = torch.where(counted > 0, rows.slots, 0).long()
    carry.index_copy_(0, slots, below.flatten(1).index_select(0, last))
