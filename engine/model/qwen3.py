"""Qwen3-MoE over packed weights, in the operations that DeepSeek's model uses, and grouped attention.

The second architecture, for figures that others publish. Experts lie where `Placement` puts them,
resident or paged, so the same model runs larger than the GPU.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.kernels import gqa
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.gqa_decode import decode_gqa_triton
from engine.kernels.linear import linear_parts_torch, linear_parts_triton
from engine.kernels.ops import Implementation, Ops, ops
from engine.kernels.rope import rope_table
from engine.kernels.row import linear_row, norm_linear_row, takes_row
from engine.kernels.rows import Narrowing, Rows
from engine.model.checkpoint import SAMPLES, CheckpointError
from engine.model.experts import Experts, Meanwhile
from engine.model.packing import join
from engine.model.placement import FILLERS, Placement
from engine.model.prefetch import Prefetch, guess_by_gate
from engine.model.quant import quantise_fp8
from engine.model.quantised import read_linear, repack_experts, repacker, stored_shapes
from engine.qwen3_config import Qwen3Config

#: Side of an FP8 block of drawn experts.
FP8_BLOCK = 128


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
        h, parts = F.embedding(rows.ids, self.embed), None
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


def tensor_shapes(c: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Official name -> shape of every tensor of a checkpoint."""
    d, inner, dim = c.hidden_size, c.moe_intermediate_size, c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (c.vocab_size, d),
    }
    for index in range(c.num_hidden_layers):
        name = f"model.layers.{index}."
        shapes |= {
            name + "input_layernorm.weight": (d,),
            name + "post_attention_layernorm.weight": (d,),
            name + "self_attn.q_proj.weight": (c.num_attention_heads * dim, d),
            name + "self_attn.k_proj.weight": (c.num_key_value_heads * dim, d),
            name + "self_attn.v_proj.weight": (c.num_key_value_heads * dim, d),
            name + "self_attn.o_proj.weight": (d, c.num_attention_heads * dim),
            name + "self_attn.q_norm.weight": (dim,),
            name + "self_attn.k_norm.weight": (dim,),
            name + "mlp.gate.weight": (c.num_experts, d),
        }
        for expert in range(c.num_experts):
            one = f"{name}mlp.experts.{expert}."
            shapes |= {
                one + "gate_proj.weight": (inner, d),
                one + "up_proj.weight": (inner, d),
                one + "down_proj.weight": (d, inner),
            }
    return shapes


class QwenCheckpoint:
    """Weights of a folder of safetensors files in the official layout, plain or quantised.

    Args:
        path: the folder.
        config: of the model.
        device: where tensors go.

    Raises:
        CheckpointError: files are absent or damaged, or tensors missing, misshapen or unknown.
        EngineError: experts' stored forms depend on each other.
    """

    threads = FILLERS

    def __init__(self, path: Path, config: Qwen3Config, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._how = config.quantisation
        self._files: dict[str, Any] = {}
        found: dict[str, tuple[int, ...]] = {}
        files = sorted(path.glob("model*.safetensors"))
        if not files:
            raise CheckpointError(path, ["expected model*.safetensors, got no such file"])
        for file in files:
            try:
                # Kept open: mapped, and its header is read once.
                opened: Any = safe_open(file, framework="pt")
            except SafetensorError as error:
                problem = f"{file.name}: not a safetensors file: {error}"
                raise CheckpointError(path, [problem]) from None
            for name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                if not name.endswith(_UNREAD):
                    self._files[name] = opened
                    found[name] = tuple(opened.get_slice(name).get_shape())
        wanted = self._wanted(config, found)
        problems = [
            f"{name}: unknown, {list(shape)}"
            if name not in wanted
            else f"{name}: expected {list(wanted[name])}, got {list(shape)}"
            for name, shape in found.items()
            if wanted.get(name) != shape
        ]
        problems += [
            f"{n}: missing, expected {list(s)}" for n, s in wanted.items() if n not in found
        ]
        if problems:
            raise CheckpointError(path, problems)
        self._prove(config)

    def _wanted(
        self, config: Qwen3Config, found: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Shapes to expect; a linear that is not there as a plain one is there as quantised."""
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in tensor_shapes(config).items():
            linear = name.removesuffix("weight")
            how = self._how
            if how is None or len(shape) != 2 or not self._is_quantised(linear, found):
                wanted[name] = shape
                continue
            stored = stored_shapes(how, *shape)
            # a scalar is stored as [] or [1]
            wanted |= {linear + n: s or found.get(linear + n, ()) for n, s in stored.items()}
        return wanted

    def _is_quantised(self, linear: str, names: Iterable[str]) -> bool:
        assert self._how is not None
        return any(linear + n in names for n in stored_shapes(self._how, 8, 8) if n != "weight")

    def _prove(self, config: Qwen3Config) -> None:
        """Show for some experts that repacking one does not depend on others."""
        if self._how is None or not self._how.method.startswith("int4"):
            return
        count = min(config.num_experts, 2 * _PROOF + 1)
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(count)]
            if self._is_quantised(names[0] + ".", self._files):
                repack_experts(repacker(self._how), [self._raw(n) for n in names], chunk=_PROOF)

    def on_host(self) -> QwenCheckpoint:
        """Give tensors where the files are mapped."""
        other = copy.copy(self)
        other._device = torch.device("cpu")
        return other

    def get(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._device)

    def fingerprint(self) -> bytes:
        """Name configuration and weights, without reading them all: 32 bytes.

        Covers config.json, every tensor's name and shape, and pages spread over each file.
        """
        digest = hashlib.blake2b(digest_size=32)
        digest.update((self._path / "config.json").read_bytes())
        for name in sorted(self._files):
            shape = self._files[name].get_slice(name).get_shape()
            digest.update(f"{name} {shape}".encode())
        for file in sorted(self._path.glob("model*.safetensors")):
            size = file.stat().st_size
            with file.open("rb") as opened:
                for sample in range(SAMPLES):
                    opened.seek(size * sample // SAMPLES)
                    digest.update(opened.read(4096))
        return digest.digest()

    def linear(self, name: str) -> Matrix:
        """Read a linear, quantised or plain."""
        if self._how is None or not self._is_quantised(name + ".", self._files):
            return Matrix("plain", self.get(name + ".weight"))
        found = read_linear(self._how, self._raw(name))
        return found.of({n: t.to(self._device) for n, t in found.tensors.items()})

    def _raw(self, name: str) -> dict[str, Tensor]:
        assert self._how is not None
        stored = stored_shapes(self._how, 8, 8)
        return {n: self._files[f"{name}.{n}"].get_tensor(f"{name}.{n}") for n in stored}


#: Tensors of quantised checkpoints that nobody here reads: order of columns (always that of the
#: file), and scales of activations, which are not quantised.
_UNREAD = (".g_idx", ".input_scale")
#: Experts that are repacked together for the proof.
_PROOF = 4


class QwenRandom:
    """Weights drawn from a seed and each tensor's name, about 1 / sqrt(K) wide.

    Args:
        config: of the model.
        device: where tensors go.
        seed: of all draws.
        fp8: whether experts are FP8 in blocks of FP8_BLOCK with power-of-two scales, the form that
            the kernels read; bfloat16 otherwise.
    """

    threads = 1

    def __init__(
        self, config: Qwen3Config, device: torch.device, seed: int = 0, *, fp8: bool = False
    ) -> None:
        self._fp8 = fp8
        self._shapes = tensor_shapes(config)
        self._device = device
        self._seed = seed

    def get(self, name: str) -> Tensor:
        """Draw a tensor, bfloat16."""
        shape = self._shapes[name]
        key = np.frombuffer(f"{self._seed} {name}".encode(), np.uint8)
        seed = int(np.random.SeedSequence(key.tolist()).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator(self._device).manual_seed(seed)
        noise = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        if len(shape) == 1:
            return 1 + 0.1 * noise
        return noise if name.endswith("embed_tokens.weight") else noise * shape[-1] ** -0.5

    def linear(self, name: str) -> Matrix:
        """Draw a linear."""
        values = self.get(name + ".weight")
        if not (self._fp8 and ".experts." in name):
            return Matrix("plain", values)
        data, scale = quantise_fp8(values.float(), FP8_BLOCK)
        return Matrix("fp8", data, scale.view(torch.uint8), FP8_BLOCK)

    def on_host(self) -> QwenRandom:
        """Itself, as engine.model.sources.RandomSource."""
        return self


def load_qwen3(
    path: Path | str,
    *,
    kernels: Implementation,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    max_model_len: int | None = None,
    slots: Mapping[int, int] | None = None,
    host_bytes: int | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
) -> Qwen3Model:
    """Load a checkpoint of the official layout.

    Args:
        path: its folder.
        kernels: "torch" or "triton".
        device: where the weights go.
        dtype: of weights and activations.
        max_model_len: positions that will be used; the model's own context by default.
        slots: layer -> GPU slots of its experts, for layers whose experts are paged.
        host_bytes: most host memory of their experts; the files serve what exceeds it.
        pins: layer -> experts of a paged layer that stay on the device.

    Raises:
        ConfigError: config.json cannot be served.
        EngineError: the files do not hold what it asks for.
    """
    path, where = Path(path), torch.device(device)
    config = Qwen3Config.from_file(path)
    return Qwen3Model(
        config,
        QwenCheckpoint(path, config, where),
        Placement(slots, device=where, host_bytes=host_bytes, pins=pins),
        ops(kernels),
        max_model_len=max_model_len or config.max_position_embeddings,
        dtype=dtype,
    )


def random_qwen3(
    config: Qwen3Config,
    *,
    kernels: Implementation,
    device: torch.device | str,
    max_model_len: int,
    seed: int = 0,
    slots: Mapping[int, int] | None = None,
    pins: Mapping[int, Sequence[int]] | None = None,
    fp8: bool = False,
) -> Qwen3Model:
    """Draw a model of a shape from a seed; arguments as `load_qwen3` and QwenRandom."""
    where = torch.device(device)
    return Qwen3Model(
        config,
        QwenRandom(config, where, seed, fp8=fp8),
        Placement(slots, device=where, pins=pins),
        ops(kernels),
        max_model_len=max_model_len,
    )
