"""What drafts tokens for a verifying pass to check: the interface, and what drafters share.

A drafter keeps rolling state of its own in the pools, beside the backbone's: `remember` adds what a
pass has seen, held back and committed like the backbone's own rings, so that snapshots, copies and
rollbacks cover it. `propose` reads that state and changes nothing.

Drafts decide only how many tokens a verifying pass yields, never which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.kernels.mhc import HcIn
from engine.kernels.rows import Rows
from engine.model.packed import PackedHead, PackedLayer

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool
    from engine.model.fast import FastModel
    from engine.model.flow import Flow, Pass

#: Draws the tokens of one place of the drafts from logits float32 [B, V]: ids int64 [B].
Pick = Callable[[Tensor, int], Tensor]


class Drafter(Protocol):
    """Drafts tokens for a FastModel.

    Attributes:
        num_tokens: n, tokens of a draft.
        taps: backbone layers whose entering streams it reads.
    """

    num_tokens: int
    taps: tuple[int, ...]

    def remember(self, state: Pass, flow: Flow) -> None:
        """Take in what a backbone pass has seen; capturable.

        Args:
            state: the pass, all layers done; what it holds back, this does too.
            flow: what left the last layer.
        """

    def propose(self, rows: Rows, pool: KVPool, pick: Pick) -> Tensor:
        """Draft the tokens after the newest of each sequence; capturable.

        Args:
            rows: one row a sequence, its token drawn and not processed yet.
            pool: memory of the requests; only read.
            pick: draws the tokens of each place in turn.

        Returns:
            int64 [B, n].
        """


def greedy(logits: Tensor, place: int) -> Tensor:
    """Pick the likeliest token, of equal ones the lowest id."""
    return logits.argmax(-1)


class Spread:
    """Makes passes of several rows a sequence out of passes of one; what is constant is kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, torch.device], tuple[Tensor, ...]] = {}

    def __call__(self, rows: Rows, size: int, ids: Tensor | None = None, back: int = 0) -> Rows:
        """Rows of `size` consecutive positions for each sequence.

        Args:
            rows: one row a sequence.
            size: rows of each.
            ids: int64 [B, size], their tokens; None where nobody reads them.
            back: how far before the sequence's position they begin; positions below 0 become 0.
        """
        batch, device = rows.num_sequences, rows.positions.device
        seq, first, lengths, offsets = self._constants(batch, size, device)
        # A copy: a step moves its rows on before the pass's rolling state is stored.
        starts = (rows.starts - back).clamp(min=0) if back else rows.starts.clone()
        return dataclasses.replace(
            rows,
            ids=seq if ids is None else ids.view(-1),
            positions=(starts[:, None] + offsets).view(-1),
            starts=starts,
            seq=seq,
            first=first,
            lengths=lengths,
            max_length=size,
            max_end=rows.max_end + size - 1,
        )

    def _constants(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        key = batch, size, device
        if key not in self._kept:
            order = torch.arange(batch, dtype=torch.int32, device=device)
            offsets = torch.arange(size, dtype=torch.int32, device=device)
            seq = order.repeat_interleave(size)
            self._kept[key] = seq, order * size, torch.full_like(order, size), offsets
        return self._kept[key]


def embed_streams(model: FastModel, ids: Tensor) -> Tensor:
    """Streams [T, S, d] of tokens int64 [T], all alike."""
    return model.ops.embed(ids, model.weights.embed, model.config.hc_mult, model.dtype)


def window_keys(
    model: FastModel, w: PackedLayer, kv: Tensor, rows: Rows, ring: Tensor, *, store: bool = False
) -> Tensor:
    """Window keys [T, D] of a stage from its projection kv [T, D]; arguments as the operation's."""
    return model.ops.window_keys(
        kv,
        w.attn.kv_norm,
        model.config.rms_norm_eps,
        model.plain_rope,
        rows,
        ring,
        form=model.forms.window,
        store=store,
    )


def window_attention(
    model: FastModel, w: PackedLayer, site: HcIn, rows: Rows, ring: Tensor, *, block: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of a stage, a window layer; stores nothing.

    Args:
        model: the backbone.
        w: of the stage.
        site: that is open.
        rows: of the pass.
        ring: of the stage, read.
        block: as in engine.kernels.attention.

    Returns:
        summands of the sublayer's output [T, P, d], and the window keys [T, D].
    """
    c, a = model.config, w.attn
    projected = model.ops.linear(site.xq, a.wq_a_wkv)
    (q,) = model.ops.norm_linear(
        projected[:, : c.q_lora_rank],
        a.q_norm,
        c.rms_norm_eps,
        [a.wq_b],
        act_group=model.act_group,
    )
    keys = window_keys(model, w, projected[:, c.q_lora_rank :], rows, ring)
    o = model.ops.attend(
        q,
        keys,
        ring,
        None,
        None,
        a.sink,
        model.plain_rope,
        rows,
        ratio=0,
        head_norm_eps=None if c.is_v41 else c.rms_norm_eps,
        window=c.sliding_window,
        scale=c.head_dim**-0.5,
        window_form=model.forms.window,
        block=block,
    )
    parts = model.ops.attention_output(o, a.wo_a, a.wo_b, c.o_groups, act_group=model.act_group)
    return parts, keys


def head_logits(
    model: FastModel,
    streams: Tensor,
    norm: Tensor,
    head: PackedHead | None,
    carried: Tensor | None,
) -> Tensor:
    """Logits float32 [T, V] of a last stage's streams [T, S, d], by the backbone's head."""
    x = model.ops.hc_head(
        streams,
        None if head is None else head.fn,
        None if head is None else head.base,
        norm,
        carried if head is None else None,
        eps=model.config.rms_norm_eps,
        hc_eps=model.config.hc_eps,
    )
    return model.ops.linear(x, model.weights.head, out_dtype=torch.float32)
