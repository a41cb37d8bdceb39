"""DeepSeek-V4 and V4.1 over packed weights, written in terms of kernels.

The same model as `engine.model.v4`, which it is compared with; section numbers refer to model.md.
It sees a pass as `Rows`: nothing here reads a device value on the host or lets a device value
decide a shape, so a pass over decode rows can be captured in a CUDA graph. Every operation comes
from an `Ops` table, Triton's or the torch twins', so that the whole can run on a CPU.

What the pass adds to the rings is written after attention has read them, so one rule serves decode,
prefill and speculative verification (engine.kernels.rows).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.config import Layer, ModelConfig
from engine.kernels.engram import Hashes
from engine.kernels.formats import Matrix
from engine.kernels.inputs import CompressorInput, HeadInput, QueryInput, WindowInput
from engine.kernels.mhc import HcIn
from engine.kernels.ops import Implementation, Ops, ops
from engine.kernels.rope import rope_table
from engine.kernels.rows import Narrowing, Rows
from engine.model.checkpoint import Checkpoint, CheckpointError, RoundTrips
from engine.model.drafting import Drafter
from engine.model.engram import Ints, NgramHash, fold_table
from engine.model.experts import Experts, Meanwhile
from engine.model.packed import PackedLayer, PackedMoe, PackedSite, PackedWeights
from engine.model.packing import pack
from engine.model.placement import Placement
from engine.model.prefetch import Guess, Prefetch, guess_by_gate, guess_by_table
from engine.model.sources import CheckpointSource, RandomSource
from engine.model.v4 import frequencies
from engine.plan.records import forms_of

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool


class Held:
    """Stores of a pass that wait until it is known how many rows of each sequence count.

    Entries and index keys are written at once: those of rows that turn out not to count lie beyond
    what anybody may see, until they are written again.
    """

    def __init__(self) -> None:
        self._stores: list[Callable[..., None]] = []

    def add(self, store: Callable[..., None]) -> None:
        """Put a store off; it takes `lengths`."""
        self._stores.append(store)

    def commit(self, lengths: Tensor) -> None:
        """Store the first rows of each sequence: int32 [G] of them, 0 allowed."""
        for store in self._stores:
            store(lengths=lengths)
        self._stores.clear()


@dataclass(slots=True)
class Pass:
    """What one pass works out once and shares between layers.

    Args:
        rows: of the pass.
        pool: memory of the requests.
        held: where stores of rolling state are put off to, None to store at once.
        taps: layer -> mean of the streams at its entry [T, d], of the layers that are tapped.
        written: layer whose entries were written before rows were left out.
        choices: index source -> places int32 [T, K] of the entries that its readers attend.
        candidates: groups that the candidate source leaves to later choosers.
    """

    rows: Rows
    pool: KVPool
    held: Held | None = None
    taps: dict[int, Tensor] = field(default_factory=dict)
    written: int | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None

    def store(self, store: Callable[..., None]) -> None:
        """Do a store of rolling state now, or when the pass's rows are known to count."""
        if self.held is None:
            store()
        else:
            self.held.add(store)

    def narrow(self, to: Narrowing) -> None:
        """Go on with fewer rows; what was chosen for those that are left stays chosen."""
        self.rows = to.rows
        self.choices = {at: to.take(choice) for at, choice in self.choices.items()}
        self.taps = {at: to.take(tap) for at, tap in self.taps.items()}
        if self.candidates is not None:
            self.candidates = to.take(self.candidates)


@dataclass(slots=True)
class Flow:
    """What passes from layer to layer.

    Args:
        streams: R [T, S, d], of the site that is open.
        parts: summands [T, P, d] of the last sublayer's output, not yet mixed in.
        site: the open site.
    """

    streams: Tensor
    parts: Tensor
    site: HcIn

    def select(self, rows: Tensor) -> Flow:
        """Keep some rows, int64 [N]."""
        return self._take(lambda tensor: tensor.index_select(0, rows))

    def narrow(self, to: Narrowing) -> Flow:
        """Go on with fewer rows."""
        return self._take(to.take)

    def head(self, count: int) -> Flow:
        """The first rows, views."""
        return self._take(lambda tensor: tensor[:count])

    def _take(self, take: Callable[[Tensor], Tensor]) -> Flow:
        old = self.site
        x = take(old.x)
        xq = x if old.xq is old.x else take(old.xq)
        site = HcIn(x, xq, take(old.pre), take(old.post), take(old.comb))
        return Flow(take(self.streams), take(self.parts), site)


#: Runs the layers from a narrowing on, given the flow of all rows; None where it does not.
TailRun = Callable[[Flow, Narrowing], Flow | None]
#: Runs the first layers of a pass, as many as it is told, pausing after each; it gives what flows out
#: of the last one, and leaves in the pass what they have chosen and tapped. None where it does not.
FrontRun = Callable[[Pass, int], Iterator[Flow | None] | None]


class FastModel:
    """A loaded model over packed weights; immutable.

    Attributes:
        drafter: takes in what every pass has seen; None where nothing is drafted.

    Args:
        config: of the model.
        weights: of the backbone.
        kernels: the operations.
        fold: int64 [vocab], token id to folded id; None without Engram.
        round_trips: as in engine.model.v4.Model.
        max_model_len: positions the rotary tables cover.
        dtype: of activations: bfloat16, or float32 in tests.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedWeights,
        kernels: Ops,
        *,
        fold: Ints | None,
        round_trips: bool,
        max_model_len: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.ops = kernels
        self.prefetch: Prefetch | None = None
        self.round_trips = round_trips
        self.weights = weights
        self._device = device = weights.embed.device
        self._first_pre = torch.eye(config.hc_mult, device=device)[:1]
        self._scale = config.head_dim**-0.5
        plain, compressed = frequencies(config, device)
        self._rope = rope_table(plain, max_model_len), rope_table(compressed, max_model_len)
        v41 = config.is_v41
        group = config.weight_block_size or (32 if v41 else 128)
        self.act_group = group if round_trips else None
        self.forms = forms_of(is_v41=v41, is_quantised=round_trips)
        self._mixing: dict[str, Any] = {
            "eps": config.rms_norm_eps,
            "hc_eps": config.hc_eps,
            "iterations": config.hc_sinkhorn_iters,
            "act_group": self.act_group,
        }
        self.drafter: Drafter | None = None
        self._image = -1 if config.image_token_id is None else config.image_token_id
        self._fold, self._pad, self._hashes = self._prepare_engram(fold)

    @property
    def experts(self) -> tuple[Experts, ...]:
        """Routed experts of each layer."""
        return tuple(layer.moe.experts for layer in self.weights.layers)

    @property
    def gates(self) -> tuple[Tensor, ...]:
        """Router [E, d] of each layer."""
        return tuple(layer.moe.gate for layer in self.weights.layers)

    def decode(self, rows: Rows, pool: KVPool) -> Tensor:
        """Process one row of each sequence.

        Capturable in a CUDA graph: no host sync, every launch decided by shapes.

        Args:
            rows: one row a sequence; padding allowed.
            pool: memory of the requests.

        Returns:
            float32 [T, V].
        """
        return self.run(Pass(rows, pool))

    def run(self, state: Pass) -> Tensor:
        """Process rows whose logits are all wanted, as the pass says; capturable.

        Args:
            state: rows, pool, and what is held back or tapped.

        Returns:
            float32 [T, V].
        """
        (flow,) = deque(self._layers(state), maxlen=1)  # those before are not kept
        assert flow is not None
        return self._logits(flow, None)

    def prefill(
        self,
        rows: Rows,
        pool: KVPool,
        logit_rows: Tensor,
        scored: Sequence[Tensor] = (),
        narrowings: Sequence[Narrowing] = (),
        tail: TailRun | None = None,
        front: FrontRun | None = None,
    ) -> Iterator[Tensor | None]:
        """Process chunks of any length, pausing between layers.

        Args:
            rows: of the chunks.
            pool: memory of the requests.
            logit_rows: int64 [L], rows whose logits are wanted; L may be 0.
            scored: int64 [N] each, further rows, some at a time since logits are wide.
            narrowings: where later layers process fewer rows, ascending; logit_rows and scored
                then count the rows of the last one.
            tail: may run all layers from a narrowing on at once, where there is only one.
            front: may run all layers before the first narrowing.

        Yields:
            None after each layer, then the logits, float32 [L, V], then those of each part of the
            scored rows, float32 [N, V].
        """
        for flow in self._layers(Pass(rows, pool), narrowings, tail, front):  # noqa: B007
            yield None  # the last flow is needed
        assert flow is not None
        yield self._logits(flow, logit_rows)
        for part in scored:
            yield self._logits(flow, part)

    def run_tail(self, first: int, flow: Flow, state: Pass) -> Flow:
        """Process rows in the layers from `first` on, whose entries are written; capturable.

        Args:
            first: the first layer, which is behind the last one with an Engram table and not behind
                any that a drafter reads.
            flow: of these rows, from the layer before.
            state: rows and pool.
        """
        (flow,) = deque(self.layers(state, first, flow), maxlen=1)
        if self.drafter is not None:
            self.drafter.remember(state, flow)
        return flow

    def layers(self, state: Pass, first: int = 0, flow: Flow | None = None) -> Iterator[Flow]:
        """Process rows layer by layer, each of which is capturable.

        What is stored when all layers have run, the n-gram history and what a drafter remembers, is
        left to the caller.

        Args:
            state: rows and pool.
            first: the first layer.
            flow: of these rows, from the layer before; None where there is none.

        Yields:
            what flows out of each layer.
        """
        c, w = self.config, self.weights
        if flow is None:
            streams = self.ops.embed(state.rows.ids, w.embed, c.hc_mult, self.dtype)
        for layer, lw in zip(c.layers[first:], w.layers[first:], strict=True):
            flow = self._layer(layer, lw, streams if flow is None else flow.streams, flow, state)
            yield flow

    def _layers(
        self,
        state: Pass,
        narrowings: Sequence[Narrowing] = (),
        tail: TailRun | None = None,
        front: FrontRun | None = None,
    ) -> Iterator[Flow | None]:
        """Run the layers one by one; the pass's memory is complete after the last.

        Ends early where no row is left. Gives no flow of layers that a front runs, but of its last.
        """
        c, rows, pool = self.config, state.rows, state.pool
        flow: Flow | None = None
        is_remembered = False
        stages = {stage.layer: stage for stage in narrowings}
        last = len(c.layers)
        ahead = min(stages, default=last)  # layers that process all rows
        before = front(state, ahead) if front is not None and ahead else None
        if before is None:
            before = itertools.islice(self.layers(state), ahead)
        for flow in before:
            yield flow
        for at in range(ahead, last):
            stage = stages.get(at)
            layer, lw = c.layers[at], self.weights.layers[at]
            if stage is not None:
                assert flow is not None
                if layer.owns_entries:
                    self._write_entries(layer, lw, flow, state)
                if tail is not None and len(narrowings) == 1:
                    done = tail(flow, stage)
                    if done is not None:
                        flow, is_remembered = done, True
                        yield flow
                        break
                flow = flow.narrow(stage)
                state.narrow(stage)
                if not stage.rows.num_rows:
                    yield flow
                    break
            assert flow is not None
            flow = self._layer(layer, lw, flow.streams, flow, state)
            yield flow
        if c.engram is not None:
            assert self._fold is not None
            store = partial(
                self.ops.store_history, rows, self._fold, pool.history, image=self._image
            )
            state.store(store)
        if (
            self.drafter is not None
            and flow is not None
            and state.rows.num_rows
            and not is_remembered
        ):
            self.drafter.remember(state, flow)

    def _layer(
        self, layer: Layer, w: PackedLayer, streams: Tensor, before: Flow | None, state: Pass
    ) -> Flow:
        carried = before.site.pre if before else self.first_pre(streams)
        if w.engram is not None:
            if before is not None:
                site = before.site
                streams = self.ops.hc_out(before.streams, before.parts, site.post, site.comb)
            streams = self._engram(layer, w, streams, state)
            site = self.open_site(w.attn_site, streams, carried)
        elif before is None:
            site = self.open_site(w.attn_site, streams, carried)
        else:
            streams, site = self.turn(before.streams, before.parts, before.site, w.attn_site)
        if self.drafter is not None and layer.index in self.drafter.taps:
            state.taps[layer.index] = streams.mean(1)
        parts = self._attention(layer, w, site, state)
        streams, site = self.turn(streams, parts, site, w.ffn_site)
        image = state.rows.ids == self._image if w.moe.bias_vl is not None else None
        k = self.config.num_experts_per_tok
        return Flow(streams, self.run_experts(w.moe, site, state.rows, image, k), site)

    def _write_entries(self, layer: Layer, w: PackedLayer, before: Flow, state: Pass) -> None:
        """Write a KV source's entries and index keys of all rows, before some are left out."""
        _, site = self.turn(before.streams, before.parts, before.site, w.attn_site)
        extras = self._extra_projections(layer, w)
        projected = self.ops.linears(
            [site.x] * len(extras), extras, out_dtypes=[torch.float32] * len(extras)
        )
        latent: Tensor | None = None
        for number, one in enumerate(self._compressors(layer, w, list(projected), state)):
            found = self.ops.compress(
                one.proj,
                one.ape,
                one.state,
                state.rows,
                ratio=layer.ratio,
                overlap=layer.overlap,
                norm_w=one.norm_w,
                eps=self.config.rms_norm_eps,
                rope=self._rope[1],
                form=one.form,
                pool=one.pool,
                dtype=self.dtype,
                want_latent=not number and self._wants_latent(w),
                store=True,
            )
            latent = latent if found is None else found
        if latent is not None:
            self._index_keys(layer, w, latent, state)
        state.written = layer.index

    def _wants_latent(self, w: PackedLayer) -> bool:
        return w.attn.index_keys is not None and w.attn.index_keys.wk is not None

    @property
    def plain_rope(self) -> Tensor:
        """Rotary table of window layers."""
        return self._rope[0]

    # ------------------------------------------------------------ streams (2.2)

    def first_pre(self, streams: Tensor) -> Tensor:
        """Weights (1, 0, 0, 0) [T, S] of V4.1's first site; V4 uses its own."""
        first = self._first_pre.expand(len(streams), -1)
        return first.contiguous() if self.config.is_v41 else first

    def open_site(self, site: PackedSite, streams: Tensor, carried: Tensor) -> HcIn:
        """Open the first site after the embedding, or after something else changed the streams."""
        own = carried if self.config.is_v41 else None
        return self.ops.hc_in(streams, site.fn, site.base, site.norm, own, **self._mixing)

    def turn(
        self, streams: Tensor, parts: Tensor, closing: HcIn, opening: PackedSite
    ) -> tuple[Tensor, HcIn]:
        """Mix a sublayer's output in and open the next site."""
        return self.ops.hc_turn(
            streams,
            parts,
            closing.post,
            closing.comb,
            opening.fn,
            opening.base,
            opening.norm,
            closing.pre if self.config.is_v41 else None,
            **self._mixing,
        )

    def _logits(self, flow: Flow, wanted: Tensor | None) -> Tensor:
        w, c = self.weights, self.config
        if wanted is not None:
            if not len(wanted):
                return flow.streams.new_empty((0, c.vocab_size), dtype=torch.float32)
            flow = flow.select(wanted)
        site, pre = flow.site, flow.site.pre
        head = w.hc_head
        x = self.ops.hc_head(
            flow.streams,
            None if head is None else head.fn,
            None if head is None else head.base,
            w.norm,
            pre if head is None else None,
            eps=c.rms_norm_eps,
            hc_eps=c.hc_eps,
            closing=(flow.parts, site.post, site.comb),
        )
        return self.ops.linear(x, w.head, out_dtype=torch.float32)

    # ------------------------------------------------------------ attention (2.4)

    def _attention(self, layer: Layer, w: PackedLayer, site: HcIn, state: Pass) -> Tensor:
        c, k, rows, pool = self.config, self.ops, state.rows, state.pool
        a = w.attn
        rope = self._rope[layer.ratio > 0]
        inputs, weights = [site.xq], [a.wq_a_wkv]
        kinds: list[torch.dtype | None] = [None]
        writes = layer.index != state.written
        for extra in self._extra_projections(layer, w, writes=writes):
            inputs.append(site.x)
            weights.append(extra)
            kinds.append(torch.float32)
        projected, *extras = k.linears(inputs, weights, out_dtypes=kinds)
        queries = [a.wq_b] + ([a.indexer.wq_b] if a.indexer else [])
        idle = 0 if layer.builds_candidates or layer.reads_candidates else c.index_topk
        q, *index_q = k.norm_linear(
            projected[:, : c.q_lora_rank],
            a.q_norm,
            c.rms_norm_eps,
            queries,
            act_group=self.act_group,
            wanted=(rows.positions, (idle + 1) * layer.ratio - 1) if a.indexer and idle else None,
        )
        ring = pool.window[layer.index]
        compressors = self._compressors(layer, w, extras, state) if writes else []
        kept = state.held is None
        head_norm = None if c.is_v41 else c.rms_norm_eps
        k_rows, latent, chooser, ready = k.attention_inputs(
            WindowInput(projected[:, c.q_lora_rank :], a.kv_norm, ring, self.forms.window),
            compressors,
            QueryInput(index_q[0], c.index_head_dim, self.forms.index, idle) if index_q else None,
            HeadInput(q, a.sink.shape[0], head_norm),
            rope,
            rows,
            ratio=layer.ratio,
            overlap=layer.overlap,
            eps=c.rms_norm_eps,
            want_latent=writes and self._wants_latent(w),
            store=kept,
        )
        if not kept:
            self._hold_state(layer, compressors, state)
        if latent is not None:
            self._index_keys(layer, w, latent, state)
        if layer.owns_index:
            self._choose(layer, chooser, extras[-1], state)
        choice = None if layer.index_source is None else state.choices[layer.index_source]
        o = k.attend(
            q if ready is None else ready,
            k_rows,
            ring,
            None if layer.kv_source is None else pool.entries[layer.kv_source],
            choice,
            a.sink,
            rope,
            rows,
            ratio=layer.ratio,
            head_norm_eps=head_norm,
            window=c.sliding_window,
            scale=self._scale,
            window_form=self.forms.window,
            entry_form=self.forms.entries,
            ready=ready is not None,
        )
        if not rows.is_decode or state.held is not None:
            state.store(partial(k.store_window, k_rows, rows, ring))
        return k.attention_output(o, a.wo_a, a.wo_b, c.o_groups, act_group=self.act_group)

    def _extra_projections(
        self, layer: Layer, w: PackedLayer, *, writes: bool = True
    ) -> list[Matrix]:
        """Products of the unrounded input: compressor, index compressor, index head weights."""
        a = w.attn
        found = []
        if a.compressor is not None and writes:
            found.append(a.compressor.proj)
        if a.index_keys is not None and a.index_keys.compressor is not None and writes:
            found.append(a.index_keys.compressor.proj)
        if a.indexer is not None:
            found.append(a.indexer.head_weights)
        return found

    def _compressors(
        self, layer: Layer, w: PackedLayer, extras: list[Tensor], state: Pass
    ) -> list[CompressorInput]:
        """Compressors that write this layer's entries and V4's index keys (2.5, 2.6, 2.9)."""
        pool, a, at = state.pool, w.attn, layer.index
        found = []
        if a.compressor is not None:
            found.append(
                CompressorInput(
                    extras[0],
                    a.compressor.ape,
                    pool.state.get(at),
                    a.compressor.norm,
                    self.forms.entries,
                    pool.entries[at],
                )
            )
        if a.index_keys is not None and a.index_keys.compressor is not None:
            own = a.index_keys.compressor
            found.append(
                CompressorInput(
                    extras[1],
                    own.ape,
                    pool.index_state[at],
                    own.norm,
                    self.forms.index,
                    pool.index_keys[at],
                )
            )
        return found

    def _hold_state(self, layer: Layer, compressors: list[CompressorInput], state: Pass) -> None:
        """Put off what the compressors keep of this pass's rows."""
        assert state.held is not None
        for one in compressors:
            if one.state is not None:
                keep = partial(
                    self.ops.store_state,
                    one.proj,
                    one.ape,
                    one.state,
                    state.rows,
                    ratio=layer.ratio,
                )
                state.held.add(keep)

    def _index_keys(self, layer: Layer, w: PackedLayer, latent: Tensor, state: Pass) -> None:
        """Write V4.1's index keys of the groups that this pass completes (2.9)."""
        keys = w.attn.index_keys
        assert keys is not None
        assert keys.wk is not None
        self.ops.index_keys_from_latent(
            latent,
            keys.wk,
            keys.norm,
            self.config.rms_norm_eps,
            self._rope[1],
            state.rows,
            state.pool.index_keys[layer.index],
            ratio=layer.ratio,
            form=self.forms.index,
        )

    def _choose(self, layer: Layer, q: Tensor | None, head_weights: Tensor, state: Pass) -> None:
        """Choose the entries that this layer and its readers attend (2.6, 2.9)."""
        c = self.config
        assert layer.kv_source is not None
        assert q is not None
        places, candidates = self.ops.choose(
            q,
            head_weights,
            state.pool.index_keys[layer.kv_source],
            state.rows,
            ratio=layer.ratio,
            topk=c.index_topk,
            key_form=self.forms.index,
            candidates=state.candidates if layer.reads_candidates else None,
            candidate_group=c.candidate_block_size,
            candidate_topk=c.candidate_topk_blocks if layer.builds_candidates else 0,
        )
        state.choices[layer.index] = places
        if layer.builds_candidates:
            state.candidates = candidates

    # ------------------------------------------------------------ experts (2.7)

    def run_experts(
        self, m: PackedMoe, site: HcIn, rows: Rows, image: Tensor | None, per_token: int
    ) -> Tensor:
        """Route the rows and compute their experts: summands [T, P, d]."""
        c = self.config
        routing = self.ops.route(
            site.x,
            m.gate,
            m.bias,
            m.tid2eid,
            rows,
            k=per_token,
            scaling=c.routed_scaling_factor,
            image=image,
            image_bias=m.bias_vl,
        )
        return m.experts.run(
            self.ops,
            site.xq,
            routing,
            m.shared13,
            m.shared2,
            limit=c.swiglu_limit,
            act_group=self.act_group,
            meanwhile=self._meanwhile(m.experts, site.x, rows),
        )

    def use_prefetch(self) -> None:
        """Bring experts in ahead of each layer; see engine.model.prefetch."""
        k, guesses = self.config.num_experts_per_tok, list[tuple[Experts, Guess]]()
        for m in (layer.moe for layer in self.weights.layers):
            by_gate = guess_by_gate(m.gate, k, m.bias)
            guess = by_gate if m.tid2eid is None else guess_by_table(m.tid2eid)
            guesses.append((m.experts, guess))
        self.prefetch = Prefetch(guesses, k)

    def _meanwhile(self, experts: Experts, x: Tensor, rows: Rows) -> Meanwhile | None:
        if self.prefetch is None:
            return None
        return partial(self.prefetch.begin, self.ops, experts, x, rows)

    # ------------------------------------------------------------ Engram (2.10)

    def _prepare_engram(self, fold: Ints | None) -> tuple[Tensor | None, int, list[Hashes]]:
        engram = self.config.engram
        if engram is None:
            return None, 0, []
        assert fold is not None
        hashes = []
        for index in range(len(engram.layer_ids)):
            tables = NgramHash(engram, index).tables()
            hashes.append(Hashes(*(torch.from_numpy(t).to(self._device) for t in tables)))
        pad = int(fold[engram.pad_token_id])
        return torch.from_numpy(fold).to(self._device), pad, hashes

    def _engram(self, layer: Layer, w: PackedLayer, streams: Tensor, state: Pass) -> Tensor:
        assert w.engram is not None
        assert layer.engram is not None
        assert self._fold is not None
        looked_up = self.ops.engram_lookup(
            state.rows,
            self._fold,
            state.pool.history,
            self._hashes[layer.engram],
            w.engram.table.weight,
            w.engram.table.scale,
            pad=self._pad,
            image=self._image,
            dtype=self.dtype,
        )
        projected = self.ops.linear(looked_up, w.engram.wkv, act_group=self.act_group)
        return self.ops.engram_apply(
            streams,
            projected,
            w.engram.gate,
            state.rows,
            eps=self.config.rms_norm_eps,
            image=self._image,
        )


def load_fast_model(
    path: Path | str,
    *,
    kernels: Implementation,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    round_trips: RoundTrips = "auto",
    max_model_len: int | None = None,
    slots: Mapping[int, int] | None = None,
    host_bytes: int | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
) -> FastModel:
    """Load a checkpoint of the official layout, in the form it is stored in.

    Args:
        path: its folder.
        kernels: "torch" or "triton".
        device: where the weights go.
        dtype: of activations: bfloat16 or float32.
        round_trips: as in engine.model.checkpoint.load_model.
        max_model_len: positions that will be used; the model's own context by default.
        slots: layer -> GPU slots of its experts, for layers whose experts are paged.
        host_bytes: most host memory of their experts; the files serve what exceeds it.
        pins: layer -> experts of a paged layer that stay on the device.

    Raises:
        ConfigError: config.json cannot be served.
        CheckpointError: listing every missing, misshapen, mistyped and unknown tensor.
        EngineError: Engram's tokenizer.json is unusable.
    """
    checkpoint = Checkpoint(path)
    problems = checkpoint.problems()
    if problems:
        raise CheckpointError(checkpoint.path, problems)
    config = checkpoint.config
    fold: Ints | None = None
    if config.engram:
        tokenizer = checkpoint.path / "tokenizer.json"
        fold = fold_table(tokenizer, config.vocab_size, config.engram.compressed_vocab_size)
    source = CheckpointSource(checkpoint, torch.device(device), dtype)
    return FastModel(
        config,
        pack(config, source, _placement(slots, device, host_bytes, pins), plain=dtype),
        ops(kernels),
        fold=fold,
        round_trips=config.is_quantised if round_trips == "auto" else round_trips == "on",
        max_model_len=max_model_len or config.max_position_embeddings,
        dtype=dtype,
    )


def random_fast_model(
    config: ModelConfig,
    *,
    kernels: Implementation,
    device: torch.device | str,
    max_model_len: int,
    seed: int = 0,
    slots: Mapping[int, int] | None = None,
) -> FastModel:
    """Draw a model of a shape from a seed; token ids are folded to themselves.

    Args:
        config: the shape.
        kernels: "torch" or "triton".
        device: where the weights go.
        max_model_len: positions that will be used.
        seed: of the weights.
        slots: as in load_fast_model.
    """
    fold = np.arange(config.vocab_size) if config.engram else None
    if config.engram and fold is not None:
        fold %= config.engram.compressed_vocab_size
    return FastModel(
        config,
        pack(config, RandomSource(config, torch.device(device), seed), _placement(slots, device)),
        ops(kernels),
        fold=fold,
        round_trips=config.is_quantised,
        max_model_len=max_model_len,
    )


def _placement(
    slots: Mapping[int, int] | None,
    device: torch.device | str,
    host_bytes: int | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
) -> Placement:
    where = torch.device(device)
    pin = where.type == "cuda"
    return Placement(slots, device=where, pin=pin, host_bytes=host_bytes, pins=pins)
