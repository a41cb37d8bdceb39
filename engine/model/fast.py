"""DeepSeek-V4 and V4.1 over packed weights, written in terms of kernels.

The same model as `engine.model.v4`, which it is compared with; section numbers refer to model.md.
It sees a pass as `Rows`: nothing here reads a device value on the host or lets a device value
decide a shape, so a pass over decode rows can be captured in a CUDA graph. Every operation comes
from an `Ops` table, Triton's or the torch twins', so that the whole can run on a CPU.

What the pass adds to the rings is written after attention has read them, so one rule serves decode,
prefill and speculative verification (engine.kernels.rows).

Here is how layers follow each other, with streams and experts; beside it lie what flows (`flow.py`),
attention (`attention.py`), Engram (`ngrams.py`) and how models are made (`loading.py`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import Layer, ModelConfig
from engine.kernels.mhc import HcIn
from engine.kernels.ops import Ops
from engine.kernels.rope import rope_table
from engine.kernels.rows import Narrowing, Rows
from engine.model.attention import attention, write_entries
from engine.model.drafting import Drafter
from engine.model.engram import Ints
from engine.model.experts import Experts, Meanwhile
from engine.model.flow import Flow, FrontRun, Pass, TailRun
from engine.model.ngrams import Ngrams, add_engram, store_history
from engine.model.packed import PackedLayer, PackedMoe, PackedSite, PackedWeights
from engine.model.prefetch import Guess, Prefetch, guess_by_gate, guess_by_table
from engine.model.v4 import frequencies
from engine.plan.records import forms_of

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool


class FastModel:
    """A loaded model over packed weights; immutable.

    Attributes:
        ops: the operations.
        prefetch: brings experts in ahead; None where nothing does.
        drafter: takes in what every pass has seen; None where nothing is drafted.
        act_group: columns of which inputs of products are rounded to FP8 together; None for none.
        forms: what the pools hold values in.
        plain_rope: rotary table of window layers.
        compressed_rope: rotary table of layers with entries.
        image: token id of images; -1 where there is none.
        ngrams: what Engram looks up by; None without Engram.

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
        device = weights.embed.device
        self._first_pre = torch.eye(config.hc_mult, device=device)[:1]
        plain, compressed = frequencies(config, device)
        self.plain_rope = rope_table(plain, max_model_len)
        self.compressed_rope = rope_table(compressed, max_model_len)
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
        self.image = -1 if config.image_token_id is None else config.image_token_id
        self.ngrams: Ngrams | None = None
        if config.engram is not None:
            assert fold is not None
            self.ngrams = Ngrams.of(config.engram, fold, device)

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
        c, rows = self.config, state.rows
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
                    write_entries(self, layer, lw, flow, state)
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
        if self.ngrams is not None:
            store_history(self, self.ngrams, rows, state)
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
            streams = add_engram(self, layer, w.engram, streams, state)
            site = self.open_site(w.attn_site, streams, carried)
        elif before is None:
            site = self.open_site(w.attn_site, streams, carried)
        else:
            streams, site = self.turn(before.streams, before.parts, before.site, w.attn_site)
        if self.drafter is not None and layer.index in self.drafter.taps:
            state.taps[layer.index] = streams.mean(1)
        parts = attention(self, layer, w, site, state)
        streams, site = self.turn(streams, parts, site, w.ffn_site)
        image = state.rows.ids == self.image if w.moe.bias_vl is not None else None
        k = self.config.num_experts_per_tok
        return Flow(streams, self.run_experts(w.moe, site, state.rows, image, k), site)

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
