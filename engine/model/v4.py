"""DeepSeek-V4 and V4.1, the whole model, eager, top to bottom.

The reference form: any faster path is compared with this one. It runs the chunks of many requests
in one pass over flat rows, T of them. Requests meet only in matrix products over rows; what they
remember lives in the pools that are passed in, addressed by slot and block. Section numbers refer
to model.md.

A *window* layer attends the last W tokens. A layer with a compress ratio attends compressed
entries as well, its own or those of its KV source, all visible ones or the best index_topk by the
choice of its index source. V4: CSA (ratio 4, overlapping, indexed) and HCA. V4.1: ratio 2 and 1,
shared by the layers above a source.

Single-token chunks (decode) are attended together, padded to the longest; longer chunks (prefill)
one by one in blocks of query rows. Which is which changes no result.

Where a batch has stages (engine.plan.replay), late layers process fewer rows. Layer s, the last KV
source, first writes entries and index keys of all rows, so that these are the same bytes in every
mode; then each stage narrows the pass to the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Layer, ModelConfig
from engine.kernels import reference as ops
from engine.model import quant
from engine.model.engram import NO_TOKEN, Ints, NgramHash, ngrams
from engine.model.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    LayerWeights,
    MoeWeights,
    SiteWeights,
    Weights,
)
from engine.plan.replay import tail_of, tail_problems

if TYPE_CHECKING:
    from engine.device.batch import ForwardBatch, PoolingPlan, Span, VisibleEntries
    from engine.device.kvpool import KVPool
    from engine.plan.replay import Stage

Tap = Callable[[str, Tensor], None]

#: Query rows of a prefill chunk attended together: bounds the scores held at once.
QUERY_BLOCK = 64
#: Up to this many (row, expert) pairs, computing all experts in one product beats visiting the
#: chosen ones in turn; beyond it the wasted work weighs more than the calls saved.
DENSE_PAIRS = 128


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Rows [first, last) of a prefill chunk, counted from the first of its rows that is left.

    Blocks lie on a grid from the chunk's own start, so that a chunk that loses rows at its front
    keeps its blocks, the first of them cut.
    """

    span: Span
    first: int
    last: int

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the block within a step, through all its stages."""
        return self.span.chunk, (self.span.skipped + self.last - 1) // QUERY_BLOCK

    @property
    def rows(self) -> slice:
        """Its rows in the step."""
        return slice(self.span.row + self.first, self.span.row + self.last)

    def visible(self, ratio: int) -> int:
        """Entries its last row may attend."""
        return (self.span.start + self.last) // ratio


class Step:
    """What one forward pass works out once and shares between layers."""

    def __init__(self, batch: ForwardBatch, pool: KVPool, tap: Tap | None) -> None:
        self.batch = batch
        self.pool = pool
        self.tap = tap
        self.blocks = [
            QueryBlock(span, max(first, 0), min(first + QUERY_BLOCK, span.length))
            for span in batch.prefill
            for first in range(-(span.skipped % QUERY_BLOCK), span.length, QUERY_BLOCK)
        ]
        self.written: int | None = (
            None  # layer whose entries were written before rows were left out
        )
        self.image: Tensor | None = None  # bool [T], None without image tokens
        self.ngrams: Ints | None = None  # [T, n], None without Engram
        self.turns: dict[object, Tensor] = {}
        self.plans: dict[tuple[int, bool], PoolingPlan] = {}
        self.ring: tuple[Tensor, Tensor] | None = None
        self.visible: dict[int, VisibleEntries] = {}
        self.span_entries: dict[tuple[int, int], Tensor] = {}
        # Choices by index source: of the decode rows, and of each query block.
        self.decode_choice: dict[int, tuple[Tensor, Tensor]] = {}
        self.block_choice: dict[tuple[int | None, tuple[int, int]], Tensor] = {}
        # Candidate groups (bool per entry) published by the candidate source.
        self.decode_candidates: Tensor | None = None
        self.block_candidates: dict[tuple[int, int], Tensor] = {}
        self.decode_keys: dict[tuple[int | None, int | None], tuple[Tensor, Tensor]] = {}
        self.block_masks: dict[tuple[object, ...], Tensor] = {}

    def narrow(self, stage: Stage) -> tuple[Step, Tensor]:
        """Give the step of a stage, and the rows of this one that it has: int64 [T'].

        What was chosen for the rows that are left stays chosen.
        """
        batch, rows = self.batch.narrow(stage)
        step = Step(batch, self.pool, self.tap)
        step.written = self.written
        step.image = None if self.image is None else self.image.index_select(0, rows)
        step.span_entries = self.span_entries  # of a chunk's end, which no stage moves
        sizes = {block.key: block.last - block.first for block in step.blocks}
        for (source, key), mask in self.block_choice.items():
            if key in sizes:
                step.block_choice[source, key] = mask[-sizes[key] :]
        for key, mask in self.block_candidates.items():
            if key in sizes:
                step.block_candidates[key] = mask[-sizes[key] :]
        if self.batch.decode is not None and batch.decode is not None:
            left = {span.chunk for span in batch.decode.spans}
            kept = [i for i, span in enumerate(self.batch.decode.spans) if span.chunk in left]
            at = torch.tensor(kept, device=rows.device)
            step.visible = {ratio: found.select(at) for ratio, found in self.visible.items()}
            for source, chosen in self.decode_choice.items():
                step.decode_choice[source] = chosen[0][at], chosen[1][at]
            if self.decode_candidates is not None:
                step.decode_candidates = self.decode_candidates[at]
        return step, rows


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the last layer leaves.

    Args:
        streams: [T', S, d].
        pre: of the last site, [T', S].
        batch: the rows that the last layer processed.
    """

    streams: Tensor
    pre: Tensor
    batch: ForwardBatch


class Model:
    """A loaded model; immutable, so threads may share it.

    Attributes:
        config: of the model.
        dtype: of all maths but the linears: float32, or float64 where those are.
        unused: official name -> reason, for tensors that are present and checked but not run.
        tail: the layers that need not process a whole prompt; None where there are none.
        tail_problems: why there are none.
        has_vision: whether images can be processed; always False here.
        vision_reason: why not, fit for a client.

    Args:
        config: of the model.
        weights: of the backbone.
        fold: int64 [vocab], token id to folded id; None without Engram.
        round_trips: whether activations, caches and index queries are rounded to the formats of
            the quantised checkpoint (weights always have the values that are stored).
        unused: as above.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        fold: Ints | None,
        round_trips: bool,
        unused: dict[str, str],
    ) -> None:
        self.config = config
        self.tail_problems = tuple(tail_problems(config, len(weights.layers)))
        self.tail = tail_of(config, len(weights.layers))
        self.unused = unused
        self.round_trips = round_trips
        self.has_vision = False
        self.vision_reason = (
            "this engine does not implement the vision tower"
            if config.has_vision_config
            else "the model has no vision tower"
        )
        self._weights = weights
        self.dtype = weights.embed.dtype
        device = weights.embed.device
        self._device = device
        self._scale = config.head_dim**-0.5
        self._tables = ops.SinkhornTables.make(config.hc_mult, config.hc_eps, self.dtype, device)
        self._first_pre = torch.eye(config.hc_mult, dtype=self.dtype, device=device)[:1]
        self._plain_freqs, self._compress_freqs = frequencies(config, device)
        self._hadamard = (
            ops.hadamard(config.index_head_dim, self.dtype, device)
            if (not config.is_v41 and round_trips)
            else None
        )
        self._act_group = config.weight_block_size or (32 if config.is_v41 else 128)
        self._fold = fold
        engram = config.engram
        self._hashes = (
            [NgramHash(engram, i) for i in range(len(engram.layer_ids))] if engram else []
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        *,
        all_rows: bool = False,
        tap: Tap | None = None,
    ) -> Tensor:
        """Process the chunks and update the pools.

        Args:
            batch: as in `hidden`.
            pool: memory of the requests.
            all_rows: give the logits of every row of the last layer instead of those asked for.
            tap: as in `hidden`.

        Returns:
            float32 [L, vocab], one row per chunk with wants_logits in chunk order, or [T', vocab].
            float64 where the model computes in float64.
        """
        hidden = self.hidden(batch, pool, tap=tap)
        return self.logits(hidden, None if all_rows else hidden.batch.logit_rows)

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, pool: KVPool, *, tap: Tap | None = None) -> Hidden:
        """Process the chunks through all layers and update the pools.

        Args:
            batch: the chunks; each continues exactly where its slot's sequence stands.
            pool: memory of the requests.
            tap: called with (name, tensor) for intermediate values: per layer N
                "layers.N.attn" and "layers.N.ffn" followed by ".x" (normed input [T, d]), ".y"
                (output [T, d]), ".pre" [T, S], ".post" [T, S], ".comb" [T, S, S], and
                "layers.N.streams" [T, S, d] after the layer. T is what the layer processes; a
                layer without a row is skipped.
        """
        c, w = self.config, self._weights
        step = self._begin(batch, pool, tap)
        streams = F.embedding(batch.token_ids, w.embed)[:, None].repeat(1, c.hc_mult, 1)
        pre = self._first_pre.expand(batch.num_rows, -1)
        stages = {stage.layer: stage for stage in batch.stages}
        for layer, lw in zip(c.layers, w.layers, strict=True):
            name = f"layers.{layer.index}"
            if layer.index in stages:
                if layer.owns_entries:
                    self._write_entries(layer, lw, streams, pre, step)
                step, rows = step.narrow(stages[layer.index])
                streams, pre = streams.index_select(0, rows), pre.index_select(0, rows)
            if not step.batch.num_rows:
                break
            if lw.engram is not None and layer.engram is not None:
                streams = self._engram(lw.engram, self._hashes[layer.engram], streams, step)
            streams, pre = self._site(
                lw.attn_site,
                streams,
                pre,
                partial(self._attention, layer, lw.attn, step),
                f"{name}.attn",
                step,
            )
            streams, pre = self._site(
                lw.ffn_site,
                streams,
                pre,
                partial(self._moe, lw.moe, step),
                f"{name}.ffn",
                step,
            )
            if tap:
                tap(f"{name}.streams", streams)
        return Hidden(streams, pre, step.batch)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, rows: Tensor | None = None) -> Tensor:
        """Logits [N, vocab] of rows int64 [N] of what the last layer left; of all by default."""
        if rows is None:
            return self._logits(hidden.streams, hidden.pre)
        pre = hidden.pre.index_select(0, rows)
        return self._logits(hidden.streams.index_select(0, rows), pre)

    def _write_entries(
        self, layer: Layer, w: LayerWeights, streams: Tensor, pre: Tensor, step: Step
    ) -> None:
        """Write a KV source's entries and index keys of all rows, before some are left out.

        Takes V4.1's delayed pre, as its tail does (engine.plan.replay).
        """
        u = ops.collapse(streams, pre)
        x = ops.rms_norm(u, w.attn_site.norm, self.config.rms_norm_eps)
        self._compress(layer, w.attn, x, step)
        step.written = layer.index

    # ------------------------------------------------------------ streams (2.2)

    def _site(
        self,
        site: SiteWeights,
        streams: Tensor,
        carried: Tensor,
        sublayer: Callable[[Tensor], Tensor],
        name: str,
        step: Step,
    ) -> tuple[Tensor, Tensor]:
        """Run one sublayer between its mixes.

        Args:
            site: weights.
            streams: R [T, S, d].
            carried: pre of the site before [T, S]; V4.1's input weights.
            sublayer: normed input [T, d] -> output [T, d].
            name: for taps.
            step: the pass.

        Returns:
            the new streams, and this site's pre for the site after.
        """
        c = self.config
        mixes = ops.stream_mixes(streams, site.fn, site.base, c.rms_norm_eps)
        pre, post, comb = ops.hc_coefficients(mixes, c.hc_mult, c.hc_sinkhorn_iters, self._tables)
        u = ops.collapse(streams, carried if c.is_v41 else pre)
        x = ops.rms_norm(u, site.norm, c.rms_norm_eps)
        y = sublayer(x)
        if step.tap:
            for part, value in (("x", x), ("y", y), ("pre", pre), ("post", post), ("comb", comb)):
                step.tap(f"{name}.{part}", value)
        return ops.expand(streams, y, post, comb), pre

    def _logits(self, streams: Tensor, carried: Tensor) -> Tensor:
        c, w = self.config, self._weights
        if w.hc_head is None:
            pre = carried
        else:
            mixes = ops.stream_mixes(streams, w.hc_head.fn, w.hc_head.base, c.rms_norm_eps)
            pre = mixes.sigmoid() + c.hc_eps
        x = ops.rms_norm(ops.collapse(streams, pre), w.norm, c.rms_norm_eps)
        return ops.linear(x, w.head)

    # ------------------------------------------------------------ attention (2.4)

    def _attention(self, layer: Layer, w: AttentionWeights, step: Step, x: Tensor) -> Tensor:
        c = self.config
        rows = x.shape[0]
        projected = ops.linear(self._act(x), w.wq_a_wkv)
        low = ops.rms_norm(projected[:, : c.q_lora_rank], w.q_norm, c.rms_norm_eps)
        low = self._act(low)
        q = ops.linear(low, w.wq_b).view(rows, c.num_attention_heads, c.head_dim)
        if not c.is_v41:
            q = ops.rms_norm(q, None, c.rms_norm_eps)
        turns = self._turns(step, layer.ratio > 0)
        q = ops.rope_(q, turns).mul_(self._scale)
        k = ops.rms_norm(projected[:, c.q_lora_rank :], w.kv_norm, c.rms_norm_eps)
        k = self._stored_window(ops.rope_(k, turns))
        if layer.owns_entries and layer.index != step.written:
            self._compress(layer, w, x, step)
        if layer.owns_index:
            self._choose(layer, w, x, low, step)
        o = self._attend(layer, w.sink, q, k, step)
        o = ops.rope_(o, turns.conj())
        # wo_a's input is not rounded in the official code although its weight is stored in FP8.
        return ops.linear(self._act(ops.grouped_output(o, w.wo_a)), w.wo_b)

    def _attend(self, layer: Layer, sink: Tensor, q: Tensor, k: Tensor, step: Step) -> Tensor:
        """Attention of all rows [T, H, D]; writes the layer's window ring on the way."""
        batch, ring = step.batch, step.pool.window[layer.index]
        width, head = ring.shape[1:]
        flat_ring = ring.view(-1, head)
        if ring.dtype != k.dtype:  # a chunk's own keys must look like those of earlier chunks
            k = k.to(ring.dtype).to(k.dtype)
        # What the chunks' first rows see of earlier chunks must be read before it is overwritten.
        earlier = {}
        for span in batch.prefill:
            positions = torch.arange(max(span.floor, span.start - width + 1), span.start)
            places = (span.slot * width + positions % width).to(q.device)
            earlier[span.row] = flat_ring.index_select(0, places).to(q.dtype)
        if step.ring is None:
            step.ring = batch.ring_writes(width)
        kept, places = step.ring
        kept_k = k if len(kept) == len(k) else k.index_select(0, kept)
        flat_ring.index_copy_(0, places, kept_k.to(ring.dtype))
        decode = batch.decode
        if decode is not None and decode.is_whole:
            return self._attend_decode(layer, sink, q, step)
        o = torch.empty_like(q)
        if decode is not None:
            o[decode.rows] = self._attend_decode(layer, sink, q[decode.rows], step)
        for block in step.blocks:
            own = k[block.span.row : block.span.row + block.span.length]
            window = torch.cat((earlier[block.span.row], own))
            o[block.rows] = self._attend_block(layer, sink, q[block.rows], window, block, step)
        return o

    def _attend_decode(self, layer: Layer, sink: Tensor, q: Tensor, step: Step) -> Tensor:
        """Attention of the B single-token rows [B, H, D] over ring and entries, padded."""
        decode, ring = step.batch.decode, step.pool.window[layer.index]
        assert decode is not None
        keys, mask = self._decode_keys(layer, step)
        window = ring.index_select(0, decode.slots)
        if decode.floors is not None:  # rows that were left out hold whatever was there before
            hidden = mask[:, 0, 1 : 1 + ring.shape[1]] < 0
            window = window.masked_fill(hidden[..., None], 0.0)
        keys[:, 1 : 1 + ring.shape[1]] = window
        return ops.sink_attention(q[:, None], keys, mask, sink).squeeze(1)

    def _decode_keys(self, layer: Layer, step: Step) -> tuple[Tensor, Tensor]:
        """Keys [B, 1 + W + N, D] with sink row and entries in place, and their mask [B, 1, ...].

        Shared by the layers that attend the same entries; each puts its own window in between.
        """
        source, chooser = layer.kv_source, layer.index_source
        if chooser not in step.decode_choice:
            chooser = None
        found = step.decode_keys.get((source, chooser))
        if found is not None:
            return found
        decode, pool = step.batch.decode, step.pool
        assert decode is not None
        width = pool.window[layer.index].shape[1]
        # Ring row i holds the last position up to the newest that is i modulo W; below 0: none yet.
        ends = decode.positions[:, None]
        held = ends - (ends - torch.arange(width, device=self._device)) % width
        real = held >= (0 if decode.floors is None else decode.floors[:, None])
        entries = None
        if source is not None:
            visible = self._visible(layer, step)
            places, shown = visible.places, visible.visible
            if chooser is not None:
                chosen, shown = step.decode_choice[chooser]
                # Padding must not read entries that nobody wrote: block 0 is always finite.
                places = torch.where(shown, places.gather(1, chosen), 0)
            entries = _rows_of(pool.entries[source], places)
            real = torch.cat((real, shown), 1)
        keys = torch.zeros(
            (len(real), 1 + real.shape[1], pool.window[0].shape[2]),
            dtype=self.dtype,
            device=self._device,
        )
        if entries is not None:
            keys[:, 1 + width :] = entries
        mask = F.pad(_additive(real, self.dtype), (1, 0))[:, None]
        step.decode_keys[source, chooser] = keys, mask
        return keys, mask

    def _attend_block(
        self, layer: Layer, sink: Tensor, q: Tensor, window: Tensor, block: QueryBlock, step: Step
    ) -> Tensor:
        """Attention of one query block [M, H, D].

        Args:
            layer: the layer.
            sink: [H].
            q: [M, H, D].
            window: keys of the last W - 1 positions before the chunk (fewer at the start of the
                sequence), then of the chunk itself [P + length, D].
            block: which rows.
            step: the pass.
        """
        width = self.config.sliding_window
        before = len(window) - block.span.length
        low = max(0, before + block.first - width + 1)
        parts = [window.new_zeros(1, window.shape[1]), window[low : before + block.last]]
        if layer.kv_source is not None:
            entries = self._span_entries(layer, block.span, step)
            parts.append(entries[: block.visible(layer.ratio)])
        mask = self._block_mask(layer, block, before - low, step)
        return ops.sink_attention(q[None], torch.cat(parts)[None], mask, sink)[0]

    def _span_entries(self, layer: Layer, span: Span, step: Step) -> Tensor:
        """Entries of the layer's source that a prefill chunk may attend [E, D]."""
        assert layer.kv_source is not None
        key = layer.kv_source, span.chunk
        if key not in step.span_entries:
            places = step.batch.span_places(span, layer.ratio, step.pool.block_size)
            rows = _rows_of(step.pool.entries[layer.kv_source], places)
            step.span_entries[key] = rows.to(self.dtype)
        return step.span_entries[key]

    def _block_mask(self, layer: Layer, block: QueryBlock, behind: int, step: Step) -> Tensor:
        """What the rows of a query block may attend, to be added to scores [1, M, 1 + N].

        Args:
            layer: the layer.
            block: which rows.
            behind: window keys that lie before the chunk's start.
            step: the pass.
        """
        choice = step.block_choice.get((layer.index_source, block.key))
        key = block.key, layer.ratio, None if choice is None else layer.index_source
        if key not in step.block_masks:
            start, width = block.span.start, self.config.sliding_window
            ends = torch.arange(start + block.first, start + block.last, device=self._device)
            ends = ends[:, None]
            at = torch.arange(start - behind, start + block.last, device=self._device)
            real = (at <= ends) & (at > ends - width)
            if layer.kv_source is not None:
                shown = choice
                if shown is None:
                    shown = _visible_entries(ends, block.visible(layer.ratio), layer.ratio)
                real = torch.cat((real, shown), 1)
            step.block_masks[key] = F.pad(_additive(real, self.dtype), (1, 0))[None]
        return step.block_masks[key]

    # ------------------------------------------------------------ compressed entries (2.5, 2.9)

    def _compress(self, layer: Layer, w: AttentionWeights, x: Tensor, step: Step) -> None:
        """Write the entries and index keys whose last token is in this step."""
        c, pool = self.config, step.pool
        assert w.compressor is not None
        key = None
        if layer.ratio == 1:
            latent = ops.linear(x, w.compressor.proj)
            places = step.batch.row_places(pool.block_size)
        else:
            plan = self._plan(layer, step)
            latent = self._pool_rows(layer, w.compressor, pool.state[layer.index], x, plan)
            if w.index_keys is not None and w.index_keys.compressor is not None:
                state = pool.index_state[layer.index]
                key = self._pool_rows(layer, w.index_keys.compressor, state, x, plan)
            places = plan.places
            if not len(places):
                return
        turns = self._entry_turns(layer, step)
        latent = ops.rms_norm(latent, w.compressor.norm, c.rms_norm_eps)
        if w.index_keys is not None:
            if w.index_keys.wk is not None:
                key = ops.linear(latent, w.index_keys.wk)  # of the latent as it is before RoPE
            assert key is not None
            key = ops.rope_(ops.rms_norm(key, w.index_keys.norm, c.rms_norm_eps), turns)
            _write(pool.index_keys[layer.index], places, self._stored_index(key))
        entry = self._stored_entry(ops.rope_(latent, turns))
        _write(pool.entries[layer.index], places, entry)

    def _pool_rows(
        self, layer: Layer, w: CompressorWeights, state: Tensor, x: Tensor, plan: PoolingPlan
    ) -> Tensor:
        """Project all rows, pool the groups that are complete, keep what later steps need.

        Args:
            layer: the owner.
            w: of the compressor.
            state: its rolling state [slots, ring, 2 * width].
            x: normed sublayer input [T, d].
            plan: what belongs together.

        Returns:
            new entries before their norm [N, D]; N may be 0.
        """
        rows = ops.linear(x, w.proj)
        if w.ape is not None:
            rows = rows + w.ape.index_select(0, plan.phases)
        flat = state.view(-1, state.shape[-1])
        known = torch.cat((flat.index_select(0, plan.carried).to(rows.dtype), rows))
        members = F.embedding(plan.members, known)
        flat.index_copy_(0, plan.saved_at, rows.index_select(0, plan.saved).to(flat.dtype))
        return ops.pool_entries(members, layer.overlap)

    def _plan(self, layer: Layer, step: Step) -> PoolingPlan:
        key = layer.ratio, layer.overlap
        if key not in step.plans:
            step.plans[key] = step.batch.pooling(*key, step.pool.block_size)
        return step.plans[key]

    def _visible(self, layer: Layer, step: Step) -> VisibleEntries:
        if layer.ratio not in step.visible:
            found = step.batch.decode_entries(layer.ratio, step.pool.block_size)
            step.visible[layer.ratio] = found
        return step.visible[layer.ratio]

    # ------------------------------------------------------------ choice of entries (2.6, 2.9)

    def _choose(
        self, layer: Layer, w: AttentionWeights, x: Tensor, low: Tensor, step: Step
    ) -> None:
        """Choose the entries that this layer and its readers attend, where a choice matters.

        Args:
            layer: an index source.
            w: its attention weights.
            x: normed sublayer input [T, d].
            low: the query latent [T, q_lora], rounded as the linears' input.
            step: the pass.
        """
        c = self.config
        assert w.indexer is not None
        assert layer.kv_source is not None
        decode = step.batch.decode
        if decode is not None:
            most = self._visible(layer, step).most
            restricted = step.decode_candidates is not None
            if not self._choice_matters(layer, most, restricted):
                decode = None
        blocks = [
            block
            for block in step.blocks
            if self._choice_matters(
                layer, block.visible(layer.ratio), block.key in step.block_candidates
            )
        ]
        if decode is None and not blocks:
            return
        q = ops.linear(low, w.indexer.wq_b).view(len(x), c.index_n_heads, c.index_head_dim)
        q = self._stored_index(ops.rope_(q, self._turns(step, compressed=True)))
        weights = ops.linear(x, w.indexer.head_weights)
        keys = step.pool.index_keys[layer.kv_source]
        if decode is not None:
            visible = self._visible(layer, step)
            own_keys = _rows_of(keys, visible.places).to(q.dtype)
            scores = ops.index_scores(q[decode.rows], own_keys, weights[decode.rows])
            scores.masked_fill_(~visible.visible, -torch.inf)
            if layer.builds_candidates and self._candidates_matter(visible.most):
                step.decode_candidates = self._candidates(scores, visible.counts)
            if layer.reads_candidates and step.decode_candidates is not None:
                scores.masked_fill_(~step.decode_candidates, -torch.inf)
            step.decode_choice[layer.index] = ops.select_entries(scores, c.index_topk)
        for block in blocks:
            self._choose_block(layer, q[block.rows], weights[block.rows], keys, block, step)

    def _choose_block(
        self, layer: Layer, q: Tensor, weights: Tensor, keys: Tensor, block: QueryBlock, step: Step
    ) -> None:
        """Choose for one query block; the choice is a mask [M, visible entries]."""
        span, most = block.span, block.visible(layer.ratio)
        places = step.batch.span_places(span, layer.ratio, step.pool.block_size)[:most]
        start = span.start
        ends = torch.arange(start + block.first, start + block.last, device=self._device)
        shown = _visible_entries(ends[:, None], most, layer.ratio)
        scores = ops.index_scores(q, _rows_of(keys, places).to(q.dtype), weights)
        scores.masked_fill_(~shown, -torch.inf)
        if layer.builds_candidates and self._candidates_matter(most):
            counts = (ends + 1) // layer.ratio
            step.block_candidates[block.key] = self._candidates(scores, counts)
        if layer.reads_candidates and block.key in step.block_candidates:
            scores.masked_fill_(~step.block_candidates[block.key], -torch.inf)
        chosen, real = ops.select_entries(scores, self.config.index_topk)
        step.block_choice[layer.index, block.key] = torch.zeros_like(shown).scatter(1, chosen, real)

    def _choice_matters(self, layer: Layer, most: int, restricted: bool) -> bool:
        """Whether some of up to `most` visible entries could be left out here or above."""
        return (
            most > self.config.index_topk
            or (layer.builds_candidates and self._candidates_matter(most))
            or (layer.reads_candidates and restricted)
        )

    def _candidates_matter(self, most: int) -> bool:
        c = self.config
        return most > c.candidate_topk_blocks * c.candidate_block_size

    def _candidates(self, scores: Tensor, counts: Tensor) -> Tensor:
        c = self.config
        group, k = c.candidate_block_size, c.candidate_topk_blocks
        return ops.candidate_entries(scores, counts, group, k)

    # ------------------------------------------------------------ experts (2.7)

    def _moe(self, w: MoeWeights, step: Step, x: Tensor) -> Tensor:
        scores = ops.sqrt_softplus(ops.linear(x, w.gate))
        experts = self._route(w, scores, step)
        weights = ops.route(scores, experts, self.config.routed_scaling_factor)
        x = self._act(x)
        if len(x) == 1:
            return self._one_row(w, x, experts, weights)
        if len(x) * len(w.w13) <= DENSE_PAIRS:
            return self._all_experts(w, x, experts, weights)
        return self._chosen_experts(w, x, experts, weights)

    def _route(self, w: MoeWeights, scores: Tensor, step: Step) -> Tensor:
        """Choose experts int64 [T, K]; a bias moves the choice but not the weights."""
        if w.tid2eid is not None:
            return w.tid2eid.index_select(0, step.batch.token_ids)
        assert w.bias is not None
        biased = scores + w.bias
        if step.image is not None and w.bias_vl is not None:
            biased = torch.where(step.image[:, None], scores + w.bias_vl, biased)
        return biased.topk(self.config.num_experts_per_tok, -1).indices

    def _one_row(self, w: MoeWeights, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Read only the chosen experts' weights: at one row, reading is what takes the time."""
        picked = F.pad(experts[0], (0, 1), value=len(w.w13) - 1)  # and the shared expert
        w13, w2 = w.w13.index_select(0, picked), w.w2.index_select(0, picked)
        return self._stacked_experts(w13, w2, x, F.pad(weights, (0, 1), value=1.0))

    def _all_experts(self, w: MoeWeights, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Compute every expert for every row; those not chosen have weight 0."""
        whole = weights.new_zeros(len(x), len(w.w13))
        whole[:, -1] = 1.0  # the shared expert
        whole.scatter_(1, experts, weights)
        return self._stacked_experts(w.w13, w.w2, x, whole)

    def _stacked_experts(self, w13: Tensor, w2: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Run each of N experts on every row, weighted [T, N], as two matrix products."""
        gate_up = ops.linear(x, w13.flatten(0, 1)).view(*weights.shape, -1)
        hidden = self._act(ops.swiglu(gate_up, self.config.swiglu_limit, weights))
        return ops.linear(hidden.flatten(1), w2.flatten(0, 1).t())

    def _chosen_experts(self, w: MoeWeights, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Visit each expert that some row chose, in ascending order, the shared one first."""
        limit = self.config.swiglu_limit
        hidden = ops.swiglu(ops.linear(x, w.w13[-1]), limit, None)
        y = ops.linear(self._act(hidden), w.w2[-1].t())
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        tokens, scale = order // experts.shape[1], weights.flatten()[order]
        counts = flat.bincount(minlength=len(w.w13)).tolist()
        for expert, first, last in ops.segments(counts):
            rows = tokens[first:last]
            gate_up = ops.linear(x.index_select(0, rows), w.w13[expert])
            hidden = self._act(ops.swiglu(gate_up, limit, scale[first:last]))
            y.index_add_(0, rows, ops.linear(hidden, w.w2[expert].t()))
        return y

    # ------------------------------------------------------------ Engram (2.10)

    def _engram(self, w: EngramWeights, hashes: NgramHash, streams: Tensor, step: Step) -> Tensor:
        assert step.ngrams is not None
        c = self.config
        looked_up = w.table.lookup(hashes.rows(step.ngrams), self.dtype).to(self._device)
        projected = ops.linear(self._act(looked_up), w.wkv)
        projected = projected.view(len(streams), c.hc_mult + 1, c.hidden_size)
        keys, value = projected[:, :-1], projected[:, -1:]
        gate = ops.engram_gate(streams, keys, w.gate, c.rms_norm_eps)
        if step.image is not None:
            gate = gate.masked_fill(step.image[:, None], 0.0)
        return torch.addcmul(streams, gate[..., None], value)

    def _advance_history(self, step: Step) -> Ints:
        """Work out the n-grams [T, n] of all rows and remember each request's last ids."""
        c, history = self.config, step.pool.history
        assert c.engram is not None
        assert self._fold is not None
        folded = self._fold[step.batch.host_ids]
        if c.image_token_id is not None:
            folded = np.where(step.batch.host_ids == c.image_token_id, NO_TOKEN, folded)
        pad = int(self._fold[c.engram.pad_token_id])
        found = []
        for span in step.batch.spans:
            ids = folded[span.row : span.row + span.length]
            before = history[span.slot].numpy()
            found.append(ngrams(before, ids, pad))
            before[:] = np.concatenate((before, ids))[-len(before) :]
        return np.concatenate(found)

    # ------------------------------------------------------------ step, rotary, number formats

    def _begin(self, batch: ForwardBatch, pool: KVPool, tap: Tap | None) -> Step:
        step = Step(batch, pool, tap)
        image = self.config.image_token_id
        if image is not None and (batch.host_ids == image).any():
            step.image = batch.token_ids == image
        if self._fold is not None:
            step.ngrams = self._advance_history(step)
        return step

    def _turns(self, step: Step, compressed: bool) -> Tensor:
        """Rotations of all rows at their positions, complex [T, R] (2.3)."""
        if compressed not in step.turns:
            freqs = self._compress_freqs if compressed else self._plain_freqs
            step.turns[compressed] = ops.rope_turns(step.batch.positions, freqs, self.dtype)
        return step.turns[compressed]

    def _entry_turns(self, layer: Layer, step: Step) -> Tensor:
        """Rotations of this step's new entries, each at its group's first token."""
        if layer.ratio == 1:
            return self._turns(step, compressed=True)
        key = layer.ratio, layer.overlap
        if key not in step.turns:
            positions = self._plan(layer, step).positions
            step.turns[key] = ops.rope_turns(positions, self._compress_freqs, self.dtype)
        return step.turns[key]

    def _act(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 linear (2.1)."""
        return quant.round_trip_fp8(x, self._act_group) if self.round_trips else x

    def _stored_window(self, k: Tensor) -> Tensor:
        """Window key as the cache gives it back (2.4)."""
        if not self.round_trips:
            return k
        if self.config.is_v41:
            return quant.round_trip_fp8(k, 32)
        return self._all_but_rotary(k)

    def _stored_entry(self, entry: Tensor) -> Tensor:
        """Compressed entry as the cache gives it back (2.5, 2.9)."""
        if not self.round_trips:
            return entry
        if self.config.is_v41:
            return quant.round_trip_fp4_e4m3(entry, 16)
        return self._all_but_rotary(entry)

    def _all_but_rotary(self, k: Tensor) -> Tensor:
        plain = self.config.head_dim - self.config.qk_rope_head_dim
        return torch.cat((quant.round_trip_fp8(k[..., :plain], 64), k[..., plain:]), -1)

    def _stored_index(self, x: Tensor) -> Tensor:
        """Index query or key as the indexer sees it (2.6, 2.9).

        V4's Hadamard transform is orthonormal, so that it cancels in q . k unless values are
        rounded after it.
        """
        if not self.round_trips:
            return x
        return quant.round_trip_fp4(x if self._hadamard is None else x @ self._hadamard, 32)


def frequencies(c: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary frequencies of window-only layers and of layers with compressed entries."""
    plain = ops.rope_frequencies(c.qk_rope_head_dim, c.rope_theta)
    compressed = ops.rope_frequencies(c.qk_rope_head_dim, c.compress_rope_theta)
    if c.yarn is not None:
        compressed = ops.rope_frequencies(
            c.qk_rope_head_dim,
            c.compress_rope_theta,
            factor=c.yarn.factor,
            original_len=c.yarn.original_max_position_embeddings,
            beta_fast=c.yarn.beta_fast,
            beta_slow=c.yarn.beta_slow,
        )
    return plain.to(device), compressed.to(device)


def _visible_entries(positions: Tensor, most: int, ratio: int) -> Tensor:
    """Which of entries 0..most - 1 rows at positions [M, 1] may attend: bool [M, most]."""
    entries = torch.arange(most, device=positions.device)
    return (entries + 1) * ratio <= positions + 1


def _additive(real: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where true, -inf where false."""
    return torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, -torch.inf)


def _rows_of(pool: Tensor, places: Tensor) -> Tensor:
    """Rows of a block pool [blocks, per block, D] by flat place [...]: [..., D]."""
    return F.embedding(places, pool.view(-1, pool.shape[-1]))


def _write(pool: Tensor, places: Tensor, rows: Tensor) -> None:
    """Put rows [N, D] into a block pool by flat place [N]."""
    pool.view(-1, pool.shape[-1]).index_copy_(0, places, rows.to(pool.dtype))
