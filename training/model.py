"""Trainable DeepSeek-V4.1 model on flat tokens: the twin of engine/model for learning.

One forward over [B, T] padded sequences, no caches. Same maths as the serving engine
(design: model section 2.9), written for throughput on one GPU:

* every pure function below works on [N, ...] rows with N = B*T constant, so each is compiled once
  for all sequence lengths; only the attention products see T;
* streams stay fp32, products run in `dtype` (bf16 on a GPU, fp32 in tests);
* attention is dense over all visible compressed entries. The engine selects `index_topk` of them,
  which is the same thing up to that many entries; beyond, the indexers trained by `index_loss`
  choose (training/train.py, second stage).

Parameter names are the official checkpoint's, except that routed experts are stacked
(`ffn.experts.w1` [E, I, d]); training/export.py unstacks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

STREAMS = 4
FP8_MAX = 448.0


@dataclass(frozen=True)
class Shape:
    """The fields of config.json's text_config that the maths needs."""

    vocab: int
    d: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    window: int
    experts: int
    top_k: int
    inter: int
    shared_inter: int
    route_scale: float
    limit: float
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    engram_layers: tuple[int, ...]
    engram_heads: int
    engram_dim: int
    engram_max_n: int
    engram_vocab: int
    engram_classes: int
    engram_pad: int
    iters: int
    hc_eps: float
    eps: float
    theta: float
    compress_theta: float
    yarn: dict[str, Any]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Read a V4.1 config.json (as a dict)."""
        c = config["text_config"]
        n = c["num_hidden_layers"]
        return cls(
            vocab=c["vocab_size"],
            d=c["hidden_size"],
            layers=n,
            heads=c["num_attention_heads"],
            head_dim=c["head_dim"],
            rope_dim=c["qk_rope_head_dim"],
            q_lora=c["q_lora_rank"],
            o_lora=c["o_lora_rank"],
            o_groups=c["o_groups"],
            window=c["sliding_window"],
            experts=c["n_routed_experts"],
            top_k=c["num_experts_per_tok"],
            inter=c["moe_intermediate_size"],
            shared_inter=c["moe_intermediate_size"] * c["n_shared_experts"],
            route_scale=c["routed_scaling_factor"],
            limit=c["swiglu_limit"],
            ratios=tuple(c["compress_ratios"][:n]),
            kv_sources=tuple(c["kv_source_layer_ids"]),
            index_sources=tuple(c["index_source_layer_ids"]),
            index_heads=c["index_n_heads"],
            index_dim=c["index_head_dim"],
            engram_layers=tuple(c["engram_layer_ids"]),
            engram_heads=c["engram_n_heads"],
            engram_dim=c["engram_head_dim"],
            engram_max_n=c["engram_max_ngram_size"],
            engram_vocab=c["engram_vocab_size"],
            engram_classes=c["engram_compressed_vocab_size"],
            engram_pad=c["engram_pad_token_id"],
            iters=c["hc_sinkhorn_iters"],
            hc_eps=c["hc_eps"],
            eps=c["rms_norm_eps"],
            theta=c["rope_theta"],
            compress_theta=c["compress_rope_theta"],
            yarn=c["rope_scaling"],
        )


# ---------------------------------------------------------------- pure functions on rows [N, ...]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 RMSNorm."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last 2*cos.shape[-1] dims of fp32 x."""
    n = 2 * cos.shape[-1]
    head, tail = x[..., :-n], x[..., -n:].unflatten(-1, (-1, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([head, turned], -1)


def hc_mix(
    R: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one mHC site from streams R [N, 4, d]: pre [N, 4], post [N, 4], C [N, 4, 4]."""
    z = R.flatten(1)
    m = (z @ fn.T) * (z.square().mean(-1, keepdim=True) + eps).rsqrt()
    pre = (m[:, :4] * scale[0] + base[:4]).sigmoid() + hc_eps
    post = 2 * (m[:, 4:8] * scale[1] + base[4:8]).sigmoid()
    C = (m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)).softmax(-1) + hc_eps
    C = C / (C.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        C = C / (C.sum(-1, keepdim=True) + hc_eps)
        C = C / (C.sum(-2, keepdim=True) + hc_eps)
    return pre, post, C


def hc_write(R: Tensor, y: Tensor, post: Tensor, C: Tensor) -> Tensor:
    """R'_j = post_j y + sum_i C[i, j] R_i, in fp32."""
    out = post[:, :, None] * y.float()[:, None]
    for i in range(STREAMS):
        out = out + C[:, i, :, None] * R[:, i, None, :]
    return out


def hc_read(R: Tensor, pre: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normed sublayer input from streams [N, 4, d] and pre [N, 4]."""
    return rms((pre[:, :, None] * R).sum(1), weight, eps).to(dtype)


def hc_turn(
    R: Tensor, y: Tensor, post: Tensor, C: Tensor, lag: Tensor, fn: Tensor, base: Tensor,
    scale: Tensor, weight: Tensor, eps: float, hc_eps: float, iters: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Leave one site and enter the next: (R', x, pre, post, C). One function, so it fuses."""
    R = hc_write(R, y, post, C)
    return (R, hc_read(R, lag, weight, eps, dtype), *hc_mix(R, fn, base, scale, eps, hc_eps, iters))


def hc_enter(
    R: Tensor, lag: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor,
    eps: float, hc_eps: float, iters: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Enter a site whose streams are already written (the first one, and after Engram)."""
    return (hc_read(R, lag, weight, eps, dtype), *hc_mix(R, fn, base, scale, eps, hc_eps, iters))


def attn_in(
    x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, kv_norm: Tensor,
    cos: Tensor, sin: Tensor, heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(query latent c [N, q_lora], scaled rotated q [N, H, D], rotated window key k [N, D])."""
    dt = x.dtype
    c = rms(x @ wq_a.to(dt).T, q_norm, eps).to(dt)
    q = (c @ wq_b.to(dt).T).unflatten(-1, (heads, -1)).float()
    q = rotate(q, cos[:, None], sin[:, None]) * (q.shape[-1] ** -0.5)
    k = rotate(rms(x @ wkv.to(dt).T, kv_norm, eps), cos, sin)
    return c, q.to(dt), k.to(dt)


def latent(x: Tensor, wkv: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Ratio-1 latent before RoPE, [N, D] fp32."""
    return rms(x @ wkv.to(x.dtype).T, norm, eps)


def latent2(x: Tensor, wkv: Tensor, wgate: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Ratio-2 latent before RoPE, [N/2, D] fp32: per-channel softmax over each pair of tokens."""
    kv = (x @ wkv.to(x.dtype).T).float().unflatten(0, (-1, 2))
    gate = (x @ wgate.to(x.dtype).T).float().unflatten(0, (-1, 2))
    return rms((kv * gate.softmax(1)).sum(1), norm, eps)


def attn_out(
    o: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int
) -> Tensor:
    """De-rotate heads o [N, H, D], grouped output projection -> [N, d]."""
    dt = o.dtype
    o = rotate(o.float(), cos[:, None], -sin[:, None]).to(dt).reshape(o.shape[0], groups, -1)
    z = torch.einsum("ngi,goi->ngo", o, wo_a.to(dt).unflatten(0, (groups, -1)))
    return z.flatten(1) @ wo_b.to(dt).T


def moe(
    x: Tensor, gate: Tensor, bias: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    s1: Tensor, s3: Tensor, s2: Tensor, top_k: int, scaling: float, limit: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense evaluation of all experts, weights zero where not routed: (y [N, d], load [E])."""
    dt = x.dtype
    E, I, _ = w1.shape
    s = F.softplus(x.float() @ gate.T).sqrt()
    idx = (s.detach() + bias).topk(top_k, -1).indices
    hot = F.one_hot(idx, E).sum(1).to(s.dtype)
    w = s * hot
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * scaling

    def act(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g.float().clamp(max=limit)) * u.float().clamp(-limit, limit)

    a = act(x @ w1.to(dt).flatten(0, 1).T, x @ w3.to(dt).flatten(0, 1).T)
    a = a.unflatten(-1, (E, I)) * w[:, :, None]
    y = a.to(dt).flatten(1) @ w2.to(dt).transpose(1, 2).flatten(0, 1)
    return y + act(x @ s1.to(dt).T, x @ s3.to(dt).T).to(dt) @ s2.to(dt).T, hot.mean(0)


def engram_add(
    R: Tensor, rows: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Streams plus the gated n-gram value; rows [N, tables*dim] (model section 2.10)."""
    d = R.shape[-1]
    kv = (rows.to(dtype) @ wkv.to(dtype).T).float().unflatten(-1, (STREAMS + 1, d))
    key, value = kv[:, :STREAMS], kv[:, STREAMS:]
    r_R = (R.square().mean(-1) + eps).rsqrt()
    r_k = (key.square().mean(-1) + eps).rsqrt()
    delta = (R * q_weight * k_weight * key).sum(-1) * r_R * r_k * d**-0.5
    gate = (delta.sign() * delta.abs().clamp(min=1e-6).sqrt()).sigmoid()
    return R + gate[..., None] * value


def fp8_rows(x: Tensor) -> Tensor:
    """Straight-through e4m3 round trip, one power-of-two scale per 32 values (the table's format)."""
    with torch.no_grad():
        g = x.unflatten(-1, (-1, 32))
        amax = g.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
        back = ((g / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return x + (back - x).detach()


# ---------------------------------------------------------------- Engram hashing


def next_primes(start: int, count: int, taken: set[int]) -> list[int]:
    """`count` primes above `start` that are not in `taken`; adds them to it."""
    found: list[int] = []
    n = start
    while len(found) < count:
        n += 1
        if n not in taken and n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1)):
            found.append(n)
            taken.add(n)
    return found


class NGramHash:
    """Rows of the n-gram tables for every position of [B, T] ids."""

    def __init__(self, shape: Shape, fold: np.ndarray, device: torch.device) -> None:
        self.fold = torch.from_numpy(fold.astype(np.int64)).to(device)
        self.max_n = shape.engram_max_n
        self.pad = int(fold[shape.engram_pad])
        taken: set[int] = set()
        self.mult: dict[int, list[int]] = {}
        self.primes: dict[int, Tensor] = {}
        self.offset: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}
        for layer in shape.engram_layers:
            bound = max(1, (2**63 - 1) // shape.engram_classes // 2)
            rng = np.random.default_rng(10007 * layer)
            self.mult[layer] = [int(v) * 2 + 1 for v in rng.integers(0, bound, size=self.max_n)]
            sizes: list[int] = []
            for _ in range(2, self.max_n + 1):
                sizes += next_primes(shape.engram_vocab - 1, shape.engram_heads, taken)
            self.primes[layer] = torch.tensor(sizes, device=device)
            self.offset[layer] = torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()], device=device)
            self.rows[layer] = sum(sizes)

    def __call__(self, layer: int, ids: Tensor, heads: int) -> Tensor:
        """Ids [B, T] -> table rows [B*T, (max_n-1)*heads]."""
        folded = self.fold[ids]
        h = folded * self.mult[layer][0]
        hashes = []
        for i in range(1, self.max_n):
            back = F.pad(folded, (i, 0), value=self.pad)[:, : ids.shape[1]]
            h = h ^ (back * self.mult[layer][i])
            hashes += [h] * heads
        return (torch.stack(hashes, -1) % self.primes[layer] + self.offset[layer]).flatten(0, 1)


def inv_freqs(shape: Shape, compressed: bool) -> Tensor:
    """Rotary frequencies [rope_dim/2]; YaRN for layers with compressed entries."""
    dim = shape.rope_dim
    theta = shape.compress_theta if compressed else shape.theta
    f = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not compressed:
        return f
    y = shape.yarn

    def corr(rotations: float) -> float:
        length = y["original_max_position_embeddings"]
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(corr(y["beta_fast"])), 0)
    high = min(math.ceil(corr(y["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return f * (1 - ramp) + f / y["factor"] * ramp


# ---------------------------------------------------------------- the model


class TrainModel:
    """Parameters by official name, and the loss.

    Args:
        config: parsed config.json of a V4.1 checkpoint.
        fold: [vocab] folded token ids for Engram.
        device: where parameters live.
        dtype: dtype of matrix products.
        seed: of the initial weights.
    """

    def __init__(
        self, config: dict[str, Any], fold: np.ndarray, device: str, dtype: torch.dtype, seed: int
    ) -> None:
        self.shape = Shape.from_config(config)
        self.device = torch.device(device)
        self.dtype = dtype
        self.hash = NGramHash(self.shape, fold, self.device)
        self.p = {k: v.to(self.device) for k, v in self._init(seed).items()}
        for name, value in self.p.items():
            value.requires_grad_(not name.endswith("gate.bias"))
        self.f: dict[str, Callable[..., Any]] = {
            "turn": hc_turn, "enter": hc_enter, "write": hc_write, "attn_in": attn_in, "latent": latent,
            "latent2": latent2, "attn_out": attn_out, "moe": moe, "engram": engram_add,
        }  # fmt: skip
        self._tables: dict[tuple[int, int], Any] = {}

    def compile(self) -> None:
        """Compile the row functions; N is constant in training, so each compiles once."""
        self.f = {k: torch.compile(v, dynamic=False) for k, v in self.f.items()}

    def _init(self, seed: int) -> dict[str, Tensor]:
        s, g = self.shape, torch.Generator().manual_seed(seed)
        p: dict[str, Tensor] = {}

        def mat(*size: int, std: float | None = None) -> Tensor:
            return torch.randn(*size, generator=g) * (size[-1] ** -0.5 if std is None else std)

        depth = 0.5 * s.layers**-0.5  # residual writers start small, so depth does not blow up R
        p["embed.weight"] = mat(s.vocab, s.d, std=0.3)
        p["head.weight"] = mat(s.vocab, s.d, std=0.5 * s.d**-0.5)
        p["norm.weight"] = torch.ones(s.d)
        for i in range(s.layers):
            q = f"layers.{i}."
            for j, site in enumerate(("attn", "ffn")):
                p[q + site + "_norm.weight"] = torch.ones(s.d)
                base = torch.zeros(24)
                base[:4] = -2.0
                base[(2 * i + j) % 4] = 2.0  # each site favours one stream; the mixing is learned
                base[4:8] = torch.randn(4, generator=g) * 0.5
                base[8:] = (2 * torch.eye(4) + 0.3 * torch.randn(4, 4, generator=g)).flatten()
                p[q + f"hc_{site}_fn"] = mat(24, 4 * s.d, std=0.01)
                p[q + f"hc_{site}_base"] = base
                p[q + f"hc_{site}_scale"] = torch.full((3,), 0.3)
            a = q + "attn."
            p[a + "wq_a.weight"], p[a + "q_norm.weight"] = mat(s.q_lora, s.d), torch.ones(s.q_lora)
            p[a + "wq_b.weight"] = mat(s.heads * s.head_dim, s.q_lora)
            p[a + "wkv.weight"], p[a + "kv_norm.weight"] = (
                mat(s.head_dim, s.d),
                torch.ones(s.head_dim),
            )
            p[a + "wo_a.weight"] = mat(s.o_groups * s.o_lora, s.heads * s.head_dim // s.o_groups)
            width = s.o_groups * s.o_lora
            p[a + "wo_b.weight"] = mat(s.d, width, std=width**-0.5 * depth)
            p[a + "attn_sink"] = torch.zeros(s.heads)
            if i in s.kv_sources:
                p[a + "compressor.wkv.weight"] = mat(s.head_dim, s.d)
                p[a + "compressor.norm.weight"] = torch.ones(s.head_dim)
                if s.ratios[i] == 2:
                    p[a + "compressor.wgate.weight"] = mat(s.head_dim, s.d)
            if i in s.index_sources:
                p[a + "indexer.wq_b.weight"] = mat(s.index_heads * s.index_dim, s.q_lora)
                p[a + "indexer.weights_proj.weight"] = mat(s.index_heads, s.d)
                if i in s.kv_sources:
                    p[a + "indexer.wk.weight"] = mat(s.index_dim, s.head_dim)
                    p[a + "indexer.k_norm.weight"] = torch.ones(s.index_dim)
            if i in s.engram_layers:
                tables = (s.engram_max_n - 1) * s.engram_heads
                e = q + "engram."
                p[e + "embed.weight"] = mat(self.hash.rows[i], s.engram_dim, std=0.3)
                p[e + "wkv.weight"] = mat((STREAMS + 1) * s.d, tables * s.engram_dim)
                p[e + "q_weight"], p[e + "k_weight"] = (
                    torch.ones(STREAMS, s.d),
                    torch.ones(STREAMS, s.d),
                )
            f = q + "ffn."
            p[f + "gate.weight"], p[f + "gate.bias"] = mat(s.experts, s.d), torch.zeros(s.experts)
            p[f + "experts.w1"] = mat(s.experts, s.inter, s.d)
            p[f + "experts.w3"] = mat(s.experts, s.inter, s.d)
            p[f + "experts.w2"] = mat(s.experts, s.d, s.inter, std=s.inter**-0.5 * depth)
            h = s.shared_inter
            p[f + "shared_experts.w1.weight"] = mat(h, s.d)
            p[f + "shared_experts.w3.weight"] = mat(h, s.d)
            p[f + "shared_experts.w2.weight"] = mat(s.d, h, std=h**-0.5 * depth)
        return p

    def tables(self, B: int, T: int) -> tuple[dict[int, Any], dict[int, Any]]:
        """Rotary tables by layer kind, and additive masks [T, keys] with their padding."""
        key = (B, T)
        if key not in self._tables:
            s, dev = self.shape, self.device
            pos = torch.arange(T)
            rope = {}
            for kind in (0, 1):
                angle = torch.outer(pos.float(), inv_freqs(s, bool(kind))).repeat(B, 1)
                rope[kind] = (angle.cos().to(dev), angle.sin().to(dev))
            mask = {}
            for r in set(s.ratios):
                seen = (pos[None] <= pos[:, None]) & (pos[None] > pos[:, None] - s.window)
                if r:
                    entry = torch.arange(T // r)
                    seen = torch.cat([seen, (entry[None] + 1) * r <= pos[:, None] + 1], 1)
                pad = 8 - seen.shape[1] % 8  # at least one: the sink's column
                bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
                mask[r] = (bias.to(dev, self.dtype), pad)
            self._tables[key] = (rope, mask)
        return self._tables[key]

    def forget_tables(self) -> None:
        """Drop cached masks, for callers that see many sequence lengths."""
        self._tables.clear()

    def hidden(
        self, ids: Tensor, taps: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Ids [B, T], T even -> (normed final rows [B*T, d] fp32, expert loads per layer).

        `taps`, when given, receives what the indexers need: query latents, sublayer inputs,
        latents before RoPE and the head-mean attention over compressed entries, per layer.
        """
        s, p, f, dt = self.shape, self.p, self.f, self.dtype
        B, T = ids.shape
        rope, masks = self.tables(B, T)
        R = F.embedding(ids.flatten(), p["embed.weight"])[:, None].expand(-1, STREAMS, -1)
        R = R.contiguous().float()
        lag = torch.zeros(B * T, STREAMS, device=self.device)
        lag[:, 0] = 1
        entries: Tensor | None = None
        loads = []
        const = (s.eps, s.hc_eps, s.iters, dt)
        pending: tuple[Tensor, Tensor, Tensor] | None = None

        def enter(i: int, site: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            nonlocal R, pending
            q = f"layers.{i}."
            w = (
                p[q + f"hc_{site}_fn"], p[q + f"hc_{site}_base"], p[q + f"hc_{site}_scale"],
                p[q + f"{site}_norm.weight"],
            )  # fmt: skip
            if site == "attn" and i in s.engram_layers:
                if pending is not None:
                    R = f["write"](R, *pending)
                e = q + "engram."
                rows = F.embedding(self.hash(i, ids, s.engram_heads), p[e + "embed.weight"])
                R = f["engram"](
                    R, fp8_rows(rows).flatten(1), p[e + "wkv.weight"], p[e + "q_weight"],
                    p[e + "k_weight"], s.eps, dt,
                )  # fmt: skip
                pending = None
            if pending is None:
                return f["enter"](R, lag, *w, *const)  # type: ignore[no-any-return]
            R, *rest = f["turn"](R, *pending, lag, *w, *const)
            return tuple(rest)  # type: ignore[return-value]

        for i in range(s.layers):
            a, r = f"layers.{i}.attn.", s.ratios[i]
            cos, sin = rope[min(r, 1)]
            x, pre, post, C = enter(i, "attn")
            c, q, k = f["attn_in"](
                x, p[a + "wq_a.weight"], p[a + "q_norm.weight"], p[a + "wq_b.weight"],
                p[a + "wkv.weight"], p[a + "kv_norm.weight"], cos, sin, s.heads, s.eps,
            )  # fmt: skip
            if i in s.kv_sources:
                w = (p[a + "compressor.wkv.weight"], p[a + "compressor.norm.weight"])
                if r == 2:
                    lat = f["latent2"](x, w[0], p[a + "compressor.wgate.weight"], w[1], s.eps)
                else:
                    lat = f["latent"](x, *w, s.eps)
                entries = rotate(lat, cos[::r], sin[::r]).to(dt).view(B, T // r, s.head_dim)
                if taps is not None:
                    taps[f"latent{i}"] = lat.view(B, T // r, s.head_dim)
            mask, pad = masks[r]
            parts = [k.view(B, T, s.head_dim)]
            if r:
                assert entries is not None
                parts.append(entries)
            keys = torch.cat([*parts, k.new_zeros(B, pad, s.head_dim)], 1)
            bias = torch.cat(
                [
                    mask[:, None].expand(T, s.heads, -1),
                    p[a + "attn_sink"].to(dt)[None, :, None].expand(T, s.heads, 1),
                    mask.new_full((T, s.heads, pad - 1), -torch.inf),
                ],
                2,
            ).flatten(0, 1)
            probs = torch.baddbmm(
                bias[None], q.view(B, T * s.heads, s.head_dim), keys.transpose(1, 2)
            ).softmax(-1)
            o = torch.bmm(probs, keys).view(B * T, s.heads, s.head_dim)
            if taps is not None:
                taps[f"c{i}"], taps[f"x{i}"] = c, x
                if r:
                    far = probs.view(B, T, s.heads, -1)[..., T : T + T // r]
                    taps[f"attn{i}"] = far.float().mean(2)
            y = f["attn_out"](o, cos, sin, p[a + "wo_a.weight"], p[a + "wo_b.weight"], s.o_groups)
            pending, lag = (y, post, C), pre
            x, pre, post, C = enter(i, "ffn")
            m = f"layers.{i}.ffn."
            y, load = f["moe"](
                x, p[m + "gate.weight"], p[m + "gate.bias"], p[m + "experts.w1"],
                p[m + "experts.w3"], p[m + "experts.w2"], p[m + "shared_experts.w1.weight"],
                p[m + "shared_experts.w3.weight"], p[m + "shared_experts.w2.weight"],
                s.top_k, s.route_scale, s.limit,
            )  # fmt: skip
            loads.append(load.detach())
            pending, lag = (y, post, C), pre
        assert pending is not None
        R = f["write"](R, *pending)
        return hc_read(R, lag, p["norm.weight"], s.eps, torch.float32), loads

    def loss(
        self, ids: Tensor, rows: Tensor, targets: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Mean cross entropy at `rows` of the flat [B*T] ids: (loss, accuracy, expert loads)."""
        x, loads = self.hidden(ids)
        logits = (x[rows].to(self.dtype) @ self.p["head.weight"].to(self.dtype).T).float()
        each = F.cross_entropy(logits, targets, reduction="none")
        with torch.no_grad():
            right = ((logits.argmax(-1) == targets).float() * weight).sum() / weight.sum()
        return (each * weight).sum() / weight.sum(), right, loads

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """fp32 logits [B, T, vocab]."""
        x, _ = self.hidden(ids)
        return (x @ self.p["head.weight"].float().T).view(*ids.shape, -1)

    def index_scores(self, i: int, taps: dict[str, Tensor], B: int, T: int) -> Tensor:
        """Scores [B, T, entries] of index source i (model section 2.9), differentiable in its weights."""
        s, p = self.shape, self.p
        source = max(k for k in s.kv_sources if k <= i)
        r = s.ratios[source]
        cos, sin = self.tables(B, T)[0][1]
        a, b = f"layers.{i}.attn.indexer.", f"layers.{source}.attn.indexer."
        key = rms(taps[f"latent{source}"] @ p[b + "wk.weight"].T, p[b + "k_norm.weight"], s.eps)
        n = T // r
        key = rotate(key, cos[: n * r : r], sin[: n * r : r])
        q = (taps[f"c{i}"].float() @ p[a + "wq_b.weight"].T).unflatten(-1, (s.index_heads, -1))
        q = rotate(q, cos[:, None], sin[:, None]).view(B, T, s.index_heads, -1)
        w = taps[f"x{i}"].float() @ p[a + "weights_proj.weight"].T
        w = (w * (s.index_dim * s.index_heads) ** -0.5).view(B, T, s.index_heads)
        score = key.new_zeros(B, T, n)
        for h in range(s.index_heads):
            score = score + torch.bmm(q[:, :, h], key.transpose(1, 2)).relu() * w[:, :, h, None]
        return score

    def index_loss(self, ids: Tensor, weight: Tensor) -> Tensor:
        """KL from where the reading layers look to where the indexer would look.

        The target of index source i is the mean attention, over heads and over the layers that
        use its selection, on compressed entries; the rest of the model is held fixed.

        Args:
            ids: [B, T].
            weight: [B, T] 1 where a query row counts (not padding).
        """
        s = self.shape
        B, T = ids.shape
        taps: dict[str, Tensor] = {}
        with torch.no_grad():
            self.hidden(ids, taps)
        pos = torch.arange(T, device=self.device)
        total = torch.zeros((), device=self.device)
        for n, i in enumerate(s.index_sources):
            end = s.index_sources[n + 1] if n + 1 < len(s.index_sources) else s.layers
            r = s.ratios[i]
            look = torch.stack([taps[f"attn{k}"] for k in range(i, end)]).mean(0)
            entry = torch.arange(T // r, device=self.device)
            seen = (entry[None] + 1) * r <= pos[:, None] + 1
            target = look / look.sum(-1, keepdim=True).clamp(min=1e-9)
            score = self.index_scores(i, taps, B, T).masked_fill(~seen, -1e9)
            ce = -(target * score.log_softmax(-1)).sum(-1)
            total = total + (ce * weight * seen.any(-1)).sum() / weight.sum()
        return total
