"""DSpark: a block of tokens drafted at once from what the backbone has seen (model.md 2.11).

The backbone's streams are tapped at the entry of some layers; their projection, main_x, is all that
the draft stages know of the past. Each stage is a window layer whose ring holds keys made of main_x.
A draft puts one block of queries, the sampled token and noise, after the last position; within the
block everyone sees everyone. The Markov head then draws the block's tokens one after the other.

Drafts decide only how many tokens a verifying pass yields, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.formats import Matrix, rows_from
from engine.kernels.records import unpack_torch
from engine.kernels.rope import rotate_torch
from engine.kernels.rows import Rows
from engine.model.packed import PackedDspark, PackedLayer

if TYPE_CHECKING:
    from engine.model.fast import FastModel, Pass


class Dspark:
    """The draft stages of a model; immutable.

    Attributes:
        block_size: tokens of a draft.

    Args:
        model: the backbone; its tapped layers are set here.
        weights: of the stages.
    """

    def __init__(self, model: FastModel, weights: PackedDspark) -> None:
        config = model.config.dspark
        assert config is not None
        self._model = model
        self._weights = weights
        self._config = config
        self.block_size = config.block_size
        model.tapped = config.target_layer_ids
        self._wkv = [_wkv(stage, model.config.q_lora_rank) for stage in weights.stages]

    def remember(self, state: Pass, rings: Sequence[Tensor]) -> None:
        """Take in what a backbone pass has seen.

        Args:
            state: the pass, done; what it holds back, this does too.
            rings: of the stages, [slots, W, D] each, written.
        """
        m, c = self._model, self._model.config
        taps = torch.cat([state.taps[layer] for layer in self._config.target_layer_ids], -1)
        main = m.ops.linear(taps, self._weights.main_proj, act_group=m.act_group)
        main = _rms_norm(main, self._weights.main_norm, c.rms_norm_eps)
        for stage, wkv, ring in zip(self._weights.stages, self._wkv, rings, strict=True):
            keys = self._keys(stage, m.ops.linear(main, wkv, act_group=m.act_group), state.rows)
            state.store(partial(m.ops.store_window, keys, state.rows, ring))

    def propose(
        self, sampled: Tensor, rows: Rows, rings: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft the tokens after a sampled one; capturable.

        Args:
            sampled: int64 [B], the token at each sequence's first position.
            rows: B sequences of block_size rows, from the sampled token's position on; ids are not
                read.
            rings: of the stages.

        Returns:
            int64 [B, block] ids, the likeliest of each (lowest id of equal ones); float32 logits
            [B, block, V]; float32 confidence [B, block].
        """
        m, c, w = self._model, self._model.config, self._weights
        batch = len(sampled)
        noise = sampled.new_full((batch, self.block_size - 1), self._config.noise_token_id)
        ids = torch.cat((sampled[:, None], noise), 1).flatten()
        streams = F.embedding(ids, m.weights.embed).to(m.dtype)
        streams = streams[:, None].expand(-1, c.hc_mult, -1).contiguous()
        carried = m.first_pre(streams)
        site = m.open_site(w.stages[0].attn_site, streams, carried)
        for number, (stage, ring) in enumerate(zip(w.stages, rings, strict=True), 1):
            parts = self._attention(stage, site.xq, rows, ring)
            streams, site = m.turn(streams, parts, site, stage.ffn_site)
            parts = m.run_experts(stage.moe, site, rows, None, self._config.num_experts_per_tok)
            if number < len(w.stages):
                streams, site = m.turn(streams, parts, site, w.stages[number].attn_site)
        x = self._collapse(m.ops.hc_out(streams, parts, site.post, site.comb), site.pre)
        logits = m.ops.linear(
            _rms_norm(x, w.norm, c.rms_norm_eps), m.weights.head, out_dtype=torch.float32
        ).view(batch, self.block_size, -1)
        found, scores, confidence = [], [], []
        before = sampled
        for place in range(self.block_size):
            markov = F.embedding(before, w.markov_embed)
            bias = m.ops.linear(markov.to(m.dtype), w.markov_head, out_dtype=torch.float32)
            scores.append(logits[:, place] + bias)
            before = scores[-1].argmax(-1)
            found.append(before)
            seen = torch.cat((x.view(batch, self.block_size, -1)[:, place].float(), markov), -1)
            confidence.append(F.linear(seen, w.confidence)[:, 0])
        return torch.stack(found, 1), torch.stack(scores, 1), torch.stack(confidence, 1)

    def _collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        head, c = self._weights.hc_head, self._model.config
        weights = pre
        if head is not None:
            z = streams.float().flatten(1)
            rho = torch.rsqrt(z.square().mean(-1, keepdim=True) + c.rms_norm_eps)
            weights = (F.linear(z, head.fn) * rho + head.base).sigmoid() + c.hc_eps
        return (streams.float() * weights[:, :, None]).sum(1).to(streams.dtype)

    def _keys(self, stage: PackedLayer, kv: Tensor, rows: Rows) -> Tensor:
        m = self._model
        return m.ops.window_keys(
            kv,
            stage.attn.kv_norm,
            m.config.rms_norm_eps,
            m.plain_rope,
            rows,
            None,
            form=m.forms.window,
            store=False,
        )

    def _attention(self, stage: PackedLayer, xq: Tensor, rows: Rows, ring: Tensor) -> Tensor:
        """Attention of a block: the ring of the past, and all of the block itself."""
        m, c, a = self._model, self._model.config, stage.attn
        projected = m.ops.linear(xq, a.wq_a_wkv)
        (q,) = m.ops.norm_linear(
            projected[:, : c.q_lora_rank],
            a.q_norm,
            c.rms_norm_eps,
            [a.wq_b],
            act_group=m.act_group,
        )
        keys = self._keys(stage, projected[:, c.q_lora_rank :], rows)
        batch, size = rows.num_sequences, self.block_size
        q = q.view(-1, c.num_attention_heads, c.head_dim).float()
        if not c.is_v41:
            q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        q = rotate_torch(q, m.plain_rope, rows.positions) * c.head_dim**-0.5
        width = ring.shape[1]
        shape = c.head_dim, c.qk_rope_head_dim, m.dtype
        past = unpack_torch(ring[rows.slots.long()], m.forms.window, *shape)
        real = torch.arange(width, device=ring.device) < rows.starts[:, None]
        past = torch.where(real[..., None], past, 0)
        own = unpack_torch(keys, m.forms.window, *shape).view(batch, size, -1)
        line = torch.cat((torch.zeros_like(own[:, :1]), past, own), 1).float()
        open_ = torch.ones(batch, 1, dtype=torch.bool, device=ring.device)
        seen = torch.cat((open_, real, open_.expand(-1, size)), 1)
        mask = torch.zeros(seen.shape, device=ring.device).masked_fill_(~seen, -torch.inf)
        o = reference.sink_attention(
            q.view(batch, size, c.num_attention_heads, -1),
            line,
            mask[:, None].expand(-1, size, -1),
            a.sink.float(),
        )
        o = rotate_torch(
            o.reshape(batch * size, c.num_attention_heads, -1),
            m.plain_rope,
            rows.positions,
            inverse=True,
        ).to(xq.dtype)
        o = o.reshape(batch * size, -1)
        return m.ops.attention_output(o, a.wo_a, a.wo_b, c.o_groups, act_group=m.act_group)


def _wkv(stage: PackedLayer, q_lora_rank: int) -> Matrix:
    return rows_from(stage.attn.wq_a_wkv, q_lora_rank)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference.rms_norm(x.float(), weight, eps).to(x.dtype)
