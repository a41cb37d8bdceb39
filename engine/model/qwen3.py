"""Qwen3-MoE over packed weights, in the operations that DeepSeek's model uses, and grouped attention.

The second architecture, for figures that others publish. Experts lie where `Placement` puts them,
resident or paged, so the same model runs larger than the GPU.

Here is the model; beside it lie its tensors' names and shapes (`qwen3_names.py`), where weights come
from (`qwen3_checkpoint.py`, `qwen3_random.py`) and how models are made (`qwen3_loading.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import gqa
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.gqa_decode import decode_gqa_triton
from engine.kernels.linear import linear_parts_torch, linear_parts_triton
from engine.kernels.ops import Ops
from engine.kernels.rope import rope_table
from engine.kernels.row import linear_row, norm_linear_row, takes_row
from engine.kernels.rows import Narrowing, Rows
from engine.model.experts import Experts, Meanwhile
from engine.model.packing import join
from engine.model.placement import Placement
from engine.model.prefetch import Prefetch, guess_by_gate
from engine.qwen3_config import Qwen3Config


class QwenPool(Protocol):
    """Keys and values per layer, [blocks, block_size, Hkv, D] each; engine.device.qwen_pool."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class QwenSource(Protocol):
    """Where weights come from, by the names of the official checkpoints."""

    threads: int

    def get(self, name: str) -> Tensor:
        """Tensor of a name, on the device."""

    def linear(self, name: str) -> Matrix:
        """Matrix of a linear's name (without .weight), as stored."""

    def on_host(self) -> QwenSource:
        """As engine.model.sources.Source."""


@dataclass(frozen=True, slots=True)
class QwenLayer:
    """One layer: qkv [(H + 2 * Hkv) * D, d], out [d, H * D], router [E, d]."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    out: Matrix
    post_norm: Tensor
    gate: Tensor
    experts: Experts


class Qwen3Model:
    """A loaded model; immutable.

    Args:
        config: of the model.
        source: of the weights.
        placement: where experts go.
        kernels: the operations.
        max_model_len: positions the rotary table covers.
        dtype: of weights and activations: bfloat16, or float32 in tests.
    """

    def __init__(
        self,
        config: Qwen3Config,
        source: QwenSource,
        placement: Placement,
        kernels: Ops,
        *,
        max_model_len: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = config
        self.ops = kernels
        self.dtype = dtype
        self.prefetch: Prefetch | None = None
        self._source = source
        self._placement = placement
        self.embed = self._cast("model.embed_tokens.weight")
        self.norm = self._cast("model.norm.weight")
        self.head = Matrix("plain", self._cast("lm_head.weight"))
        self.layers = tuple(self._layer(i) for i in range(config.num_hidden_layers))
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        freqs = (config.rope_theta**-half).to(self.embed.device)
        self._rope = rope_table(freqs, max_model_len)
        triton = kernels.name == "triton"
        self._prepare = gqa.prepare_qkv_triton if triton else gqa.prepare_qkv_torch
        self._attend = gqa.attend_gqa_triton if triton else gqa.attend_gqa_torch
        self._decode = decode_gqa_triton if triton else gqa.decode_gqa_torch
        self._parts = linear_parts_triton if triton else linear_parts_torch
        self._add_norm = gqa.add_norm_triton if triton else gqa.add_norm_torch

    def decode(self, rows: Rows, pool: QwenPool) -> Tensor:
        """Give float32 logits [T, V] of one row a sequence; capturable."""
        *_, (h, parts) = self._run(rows, pool)
        return self._logits(h, parts)

    @property
    def experts(self) -> tuple[Experts, ...]:
        """Experts of each layer."""
        return tuple(layer.experts for layer in self.layers)

    @property
    def gates(self) -> tuple[Tensor, ...]:
        """Router [E, d] of each layer."""
        return tuple(layer.gate for layer in self.layers)

    def prefill(
        self,
        rows: Rows,
        pool: QwenPool,
        logit_rows: Tensor,
        scored: Sequence[Tensor] = (),
        narrowings: Sequence[Narrowing] = (),
        tail: object = None,
        front: object = None,
    ) -> Iterator[Tensor | None]:
        """Process chunks; as FastModel.prefill, but that every layer processes every row here.

        Raises:
            ValueError: layers are to process fewer rows, or to run elsewhere.
        """
        if narrowings or tail is not None or front is not None:
            raise ValueError("every layer of this model processes every row, launch by launch")
        for state in self._run(rows, pool):  # noqa: B007 - the last one is needed
            yield None
        for wanted in (logit_rows, *scored):
            h, parts = (t.index_select(0, wanted) for t in state)
            if not len(wanted):
                yield h.new_empty((0, self.config.vocab_size), dtype=torch.float32)
                continue
            yield self._logits(h, parts)

    def _run(self, rows: Rows, pool: QwenPool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield residual [T, d] and the summands [T, P, d] still to be added, after each layer."""
        c = self.config
        h, parts = self.ops.embed(rows.ids, self.embed, 1, self.dtype)[:, 0], None
        for layer, keys, values in zip(self.layers, pool.keys, pool.values, strict=True):
            h, qkv = self._norm_linear(h, parts, layer.input_norm, layer.qkv)
            o = self._attention(qkv, layer, rows, keys, values)
            h, x, routing = self.ops.norm_route(
                h, o, layer.post_norm, c.rms_norm_eps, layer.gate, rows, k=c.num_experts_per_tok
            )
            parts = layer.experts.run(
                self.ops,
                x,
                routing,
                None,
                None,
                limit=float("inf"),
                act_group=None,
                meanwhile=self._meanwhile(layer.experts, x, rows),
            )
            yield h, parts

    def use_prefetch(self) -> None:
        """Bring experts in ahead of each layer; see engine.model.prefetch."""
        k = self.config.num_experts_per_tok
        guesses = [(layer.experts, guess_by_gate(layer.gate, k)) for layer in self.layers]
        self.prefetch = Prefetch(guesses, k)

    def _meanwhile(self, experts: Experts, x: Tensor, rows: Rows) -> Meanwhile | None:
        if self.prefetch is None:
            return None
        return partial(self.prefetch.begin, self.ops, experts, x, rows)

    def _attention(
        self, qkv: Tensor, layer: QwenLayer, rows: Rows, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attention sublayer from its projections, as summands [T, P, d]."""
        c = self.config
        given = qkv, layer.q_norm, layer.k_norm, c.rms_norm_eps
        where = self._rope, rows, keys, values
        if rows.is_decode:
            o = self._decode(*given, *where, heads=c.num_attention_heads)
        else:
            q = self._prepare(*given, *where, heads=c.num_attention_heads)
            o = self._attend(q, keys, values, rows)
        if self._takes_row(o, layer.out):
            return linear_row(o, layer.out)[:, None]
        return self._parts(o, layer.out)

    def _norm_linear(
        self,
        h: Tensor,
        parts: Tensor | None,
        norm: Tensor,
        w: Matrix,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add summands, norm and multiply; gives the residual and the product."""
        eps = self.config.rms_norm_eps
        if self._takes_row(h, w) and (parts is None or parts.shape[1] == 1):
            return norm_linear_row(h, parts, norm, eps, w, out_dtype=out_dtype)
        h, x = self._add_norm(h, parts, norm, eps)
        return h, self.ops.linear(x, w, out_dtype=out_dtype)

    def _takes_row(self, x: Tensor, w: Matrix) -> bool:
        return self.ops.name == "triton" and takes_row(x, w)

    def _logits(self, h: Tensor, parts: Tensor) -> Tensor:
        return self._norm_linear(h, parts, self.norm, self.head, torch.float32)[1]

    def _cast(self, name: str) -> Tensor:
        return self._source.get(name).to(self.dtype)

    def _layer(self, index: int) -> QwenLayer:
        name = f"model.layers.{index}."
        attn, mlp = name + "self_attn.", name + "mlp."

        def plain(*names: str) -> Matrix:
            values = [dequantise(self._source.linear(n), self.dtype) for n in names]
            return Matrix("plain", torch.cat(values))

        count = self.config.num_experts
        paged = self._placement.is_paged(index)
        source = self._source.on_host() if paged else self._source

        def stored(name: str) -> Matrix:
            found = source.linear(name)
            if found.kind != "plain":
                return found
            return Matrix("plain", found.data.to(self.dtype))

        def read(expert: int) -> tuple[Matrix, Matrix]:
            one = f"{mlp}experts.{expert}."
            return join([stored(one + "gate_proj"), stored(one + "up_proj")]), stored(
                one + "down_proj"
            )

        return QwenLayer(
            input_norm=self._cast(name + "input_layernorm.weight"),
            qkv=plain(attn + "q_proj", attn + "k_proj", attn + "v_proj"),
            q_norm=self._cast(attn + "q_norm.weight"),
            k_norm=self._cast(attn + "k_norm.weight"),
            out=plain(attn + "o_proj"),
            post_norm=self._cast(name + "post_attention_layernorm.weight"),
            gate=self._cast(mlp + "gate.weight"),
            experts=self._placement.place(index, read, count, threads=source.threads),
        )
