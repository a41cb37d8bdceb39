"""DSpark: a block of tokens drafted at once from what the backbone has seen (model.md 2.11).

The backbone's streams are tapped at the entry of some layers; their projection, main_x, is all that
the draft stages know of the past. Each stage is a window layer whose ring holds keys made of main_x.
A draft puts one block of queries, the sampled token and noise, after the last position; within the
block everyone sees everyone. The Markov head then draws the block's tokens one after the other.

The checkpoint's confidence head is not read: a draft always has the whole block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.formats import rows_from
from engine.kernels.rows import Rows
from engine.model.drafting import (
    Pick,
    Spread,
    embed_streams,
    head_logits,
    window_attention,
    window_keys,
)
from engine.model.packed import PackedDspark

if TYPE_CHECKING:
    from engine.device.kvpool import KVPool
    from engine.model.fast import FastModel
    from engine.model.flow import Flow, Pass


class Dspark:
    """The draft stages of a model; immutable. A Drafter.

    Attributes:
        num_tokens: of a draft: the block.
        taps: target layers.

    Args:
        model: the backbone.
        weights: of the stages.
    """

    def __init__(self, model: FastModel, weights: PackedDspark) -> None:
        config = model.config.dspark
        assert config is not None
        self._model = model
        self._weights = weights
        self._config = config
        self._spread = Spread()
        self.num_tokens = config.block_size
        self.taps = config.target_layer_ids
        self._wkv = [rows_from(s.attn.wq_a_wkv, model.config.q_lora_rank) for s in weights.stages]

    def remember(self, state: Pass, flow: Flow) -> None:
        """Put keys of main_x into the stages' rings."""
        m, w, eps = self._model, self._weights, self._model.config.rms_norm_eps
        taps = torch.cat([state.taps[layer] for layer in self.taps], -1)
        main = m.ops.linear(taps, w.main_proj, act_group=m.act_group)
        projected = m.ops.norm_linear(main, w.main_norm, eps, self._wkv, act_group=m.act_group)
        at_once = state.held is None and state.rows.is_decode
        for stage, kv, ring in zip(w.stages, projected, state.pool.draft, strict=True):
            keys = window_keys(m, stage, kv, state.rows, ring, store=at_once)
            if not at_once:
                state.store(partial(m.ops.store_window, keys, state.rows, ring))

    def propose(self, rows: Rows, pool: KVPool, pick: Pick) -> Tensor:
        """Draft a block; see engine.model.drafting."""
        m, w, per_token = self._model, self._weights, self._config.num_experts_per_tok
        batch, size = rows.num_sequences, self.num_tokens
        noise = rows.ids.new_full((batch, size - 1), self._config.noise_token_id)
        block = self._spread(rows, size, torch.cat((rows.ids[:, None], noise), 1))
        streams = embed_streams(m, block.ids)
        site = m.open_site(w.stages[0].attn_site, streams, m.first_pre(streams))
        for number, (stage, ring) in enumerate(zip(w.stages, pool.draft, strict=True), 1):
            parts, _ = window_attention(m, stage, site, block, ring, block=size)
            streams, site = m.turn(streams, parts, site, stage.ffn_site)
            parts = m.run_experts(stage.moe, site, block, None, per_token)
            if number < len(w.stages):
                streams, site = m.turn(streams, parts, site, w.stages[number].attn_site)
        streams = m.ops.hc_out(streams, parts, site.post, site.comb)
        logits = head_logits(m, streams, w.norm, w.hc_head, site.pre).view(batch, size, -1)
        found, before = [], rows.ids
        for place in range(size):
            markov = F.embedding(before, w.markov_embed).to(m.dtype)
            bias = m.ops.linear(markov, w.markov_head, out_dtype=torch.float32)
            before = pick(bias.add_(logits[:, place]), place)
            found.append(before)
        return torch.stack(found, 1)
