"""The specification in code: DeepSeek-V4 and V4.1, one sequence, position by position, float64.

A second implementation, written from the description of the architecture without reading the
engine. No caches, no batches, no fast paths; it exists to disagree with the engine when one of the
two is wrong, so no module of this folder but a test may import the engine.

Layers are walked in order, and within a layer every position in turn: `x[t]` is always the vector
of position t alone. Whatever a query looks at is a list made anew from those vectors; nothing is
kept between runs. All arithmetic is float64, so the places where the specification says fp32 or
bf16 are not marked; the only roundings are the FP8 and FP4 round trips, when they are on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle_naive import engram
from tests.oracle_naive.config import Config
from tests.oracle_naive.formats import Array, RoundTrips, hadamard
from tests.oracle_naive.weights import Weights

Vectors = list[Array]


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    out: Array = e / e.sum(axis, keepdims=True)
    return out


def rms(x: Array, eps: float) -> float:
    return math.sqrt(np.mean(x * x) + eps)


def best(scores: Sequence[float], count: int) -> set[int]:
    """Indices of the `count` largest finite scores; of equal ones the lowest index."""
    finite = [j for j in range(len(scores)) if scores[j] > -math.inf]
    return set(sorted(finite, key=lambda j: (-scores[j], j))[:count])


def rotary_frequencies(config: Config, ratio: int) -> Array:
    """Radians per position of each adjacent pair; YaRN and its own base where keys compress."""
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if ratio else config.rope_theta
    freqs = np.array([theta ** (-2 * i / width) for i in range(width // 2)])
    if not ratio:
        return freqs
    yarn = config.yarn

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns this many times over the original context."""
        wavelength = yarn["original_max_position_embeddings"] / times
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_turning(yarn["beta_slow"])), width - 1)
    for i in range(width // 2):
        stretched = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        freqs[i] *= (1 - stretched) + stretched / yarn["factor"]
    return freqs


def rotate(x: Array, position: int, freqs: Array) -> Array:
    """Turns the adjacent pairs of the last 2 * len(freqs) dims; a negative position turns back."""
    start = x.shape[-1] - 2 * len(freqs)
    even, odd = x[..., start::2], x[..., start + 1 :: 2]
    cos, sin = np.cos(position * freqs), np.sin(position * freqs)
    out = x.copy()
    out[..., start::2] = even * cos - odd * sin
    out[..., start + 1 :: 2] = even * sin + odd * cos
    return out


def engram_gate(match: float) -> float:
    return float(sigmoid(np.sign(match) * np.sqrt(max(abs(match), 1e-6))))


@dataclass
class Mix:
    """What one mHC site draws from the streams: [S], [S], [S, S] (source, target)."""

    pre: Array
    post: Array
    comb: Array


class Naive:
    """One run over one sequence.

    Args:
        config: the model's.
        weights: official names.
        ids: the sequence.
        round_trips: whether activations and cached vectors pass through FP8 and FP4.
        fold: Engram's compressed id of every token id; needed with Engram layers.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        ids: Sequence[int],
        *,
        round_trips: bool = False,
        fold: Sequence[int] | None = None,
    ) -> None:
        self.c, self.w, self.ids, self.fold = config, weights, list(ids), fold
        self.store = RoundTrips(round_trips)
        self.entries: dict[int, Vectors] = {}  # KV source layer -> compressed entries
        self.index_keys: dict[int, Vectors] = {}  # KV source layer -> index keys
        self.selected: dict[int, list[set[int]]] = {}  # index source layer -> entries per query
        self.candidates: list[set[int]] = []  # of the candidate source, per query
        self.block_inputs: dict[int, Vectors] = {}  # layer -> streams before its attention site

    # --- the whole

    def logits(self) -> Array:
        """[T, vocab_size]."""
        streams, pres = self.backbone()
        return np.array([self.head(s, p) for s, p in zip(streams, pres, strict=True)])

    def backbone(self) -> tuple[Vectors, Vectors]:
        """Streams [S, d] after the last layer, and the pre of its FFN site [S], per position."""
        c = self.c
        streams = [np.tile(self.w["embed.weight"][i], (c.hc_mult, 1)) for i in self.ids]
        pres = [np.eye(c.hc_mult)[0] for _ in self.ids]  # V4.1's first site reads stream 0 alone
        for layer in range(c.num_hidden_layers):
            if layer in c.engram_layer_ids:
                streams = [self.engram(layer, s, t) for t, s in enumerate(streams)]
            self.block_inputs[layer] = streams
            streams, pres = self.block(f"layers.{layer}", streams, pres, layer)
        return streams, pres

    def block(
        self, name: str, streams: Vectors, pres: Vectors, layer: int
    ) -> tuple[Vectors, Vectors]:
        streams, pres = self.site(
            name, "attn", streams, pres, lambda x: self.attention(name, x, layer)
        )
        return self.site(
            name,
            "ffn",
            streams,
            pres,
            lambda x: [self.moe(f"{name}.ffn", x[t], self.ids[t], layer) for t in range(len(x))],
        )

    def head(self, streams: Array, pre: Array) -> Array:
        x = self.collapse("hc_head", streams, pre)
        return self.w["head.weight"] @ self.norm("norm", x)

    def collapse(self, name: str, streams: Array, pre: Array) -> Array:
        """V4 has a head of its own for this, V4.1 takes the pre of the site before."""
        if self.c.v41:
            return pre @ streams
        z = streams.reshape(-1)
        m = self.w[f"{name}_fn"] @ z / rms(z, self.c.rms_norm_eps)
        own = sigmoid(m * self.w[f"{name}_scale"][0] + self.w[f"{name}_base"]) + self.c.hc_eps
        return own @ streams

    # --- parts that every layer has

    def norm(self, name: str, x: Array) -> Array:
        return x / rms(x, self.c.rms_norm_eps) * self.w[f"{name}.weight"]

    def linear(self, name: str, x: Array) -> Array:
        """A matrix stored in FP8 or FP4 sees its input through FP8."""
        if f"{name}.weight" in self.w.quantised:
            x = self.store.fp8(x, 32 if self.c.v41 else 128)
        return self.w[f"{name}.weight"] @ x

    def mix(self, name: str, streams: Array) -> Mix:
        c, s = self.c, self.c.hc_mult
        z = streams.reshape(-1)
        m = self.w[f"{name}_fn"] @ z / rms(z, c.rms_norm_eps)
        base, scale = self.w[f"{name}_base"], self.w[f"{name}_scale"]
        pre = sigmoid(m[:s] * scale[0] + base[:s]) + c.hc_eps
        post = 2 * sigmoid(m[s : 2 * s] * scale[1] + base[s : 2 * s])
        comb = softmax((m[2 * s :] * scale[2] + base[2 * s :]).reshape(s, s), axis=1) + c.hc_eps
        comb = comb / (comb.sum(axis=0, keepdims=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(axis=1, keepdims=True) + c.hc_eps)
            comb = comb / (comb.sum(axis=0, keepdims=True) + c.hc_eps)
        return Mix(pre, post, comb)

    def site(
        self,
        name: str,
        kind: str,
        streams: Vectors,
        pres: Vectors,
        sublayer: Callable[[Vectors], Vectors],
    ) -> tuple[Vectors, Vectors]:
        """One mHC site around a sublayer: the new streams, and this site's pre."""
        mixes = [self.mix(f"{name}.hc_{kind}", s) for s in streams]
        used = self.used_pre(pres, [m.pre for m in mixes])
        x = [self.norm(f"{name}.{kind}_norm", p @ s) for p, s in zip(used, streams, strict=True)]
        y = sublayer(x)
        new = [
            m.post[:, None] * out + m.comb.T @ s
            for m, out, s in zip(mixes, y, streams, strict=True)
        ]
        return new, [m.pre for m in mixes]

    def used_pre(self, before: Vectors, own: Vectors) -> Vectors:
        """V4.1 lags by one site: what a site reads with was drawn at the site before."""
        return before if self.c.v41 else own

    # --- attention

    def attention(self, name: str, x: Vectors, layer: int) -> Vectors:
        """x [d] per position, already normed, to [d] per position."""
        c, attn = self.c, f"{name}.attn"
        ratio = c.compress_ratios[layer]
        freqs = rotary_frequencies(c, ratio)
        positions = range(len(x))
        latents = [self.query_latent(attn, x[t]) for t in positions]
        keys = [self.window_key(attn, x[t], t, freqs) for t in positions]
        if ratio:
            self.compress(attn, x, layer, freqs)
            self.index(attn, x, latents, layer, freqs)
        out = []
        for t in positions:
            seen = keys[max(0, t - c.sliding_window + 1) : t + 1]
            if ratio:
                entries = self.entries[self.kv_source(layer)]
                seen = seen + [entries[j] for j in self.visible(layer, t)]
            q = self.query(attn, latents[t], t, freqs)
            out.append(self.output(attn, self.attend(attn, q, np.array(seen)), t, freqs))
        return out

    def query_latent(self, attn: str, x: Array) -> Array:
        return self.norm(f"{attn}.q_norm", self.linear(f"{attn}.wq_a", x))

    def query(self, attn: str, latent: Array, t: int, freqs: Array) -> Array:
        """[H, D]."""
        c = self.c
        q = self.linear(f"{attn}.wq_b", latent).reshape(c.num_attention_heads, c.head_dim)
        return rotate(self.head_norm(q), t, freqs)

    def head_norm(self, q: Array) -> Array:
        """V4 only, without a weight."""
        if self.c.v41:
            return q
        return np.array([head / rms(head, self.c.rms_norm_eps) for head in q])

    def window_key(self, attn: str, x: Array, t: int, freqs: Array) -> Array:
        """[D]; key and value in one."""
        k = rotate(self.norm(f"{attn}.kv_norm", self.linear(f"{attn}.wkv", x)), t, freqs)
        return self.store.fp8(k, 32) if self.c.v41 else self.store_but_tail(k)

    def store_but_tail(self, k: Array) -> Array:
        """V4's form, of window keys and of entries: the rotary tail stays as it is."""
        plain = self.c.head_dim - self.c.qk_rope_head_dim
        return np.concatenate([self.store.fp8(k[:plain], 64), k[plain:]])

    def attend(self, attn: str, q: Array, keys: Array) -> Array:
        """q [H, D], keys [n, D] to [H, D]; each head's sink takes weight and gives nothing."""
        logits = q @ keys.T / math.sqrt(self.c.head_dim)
        sink = self.w[f"{attn}.attn_sink"][:, None]
        top = np.maximum(logits.max(axis=1, keepdims=True), sink)
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        o: Array = (weights / total) @ keys
        return o

    def output(self, attn: str, o: Array, t: int, freqs: Array) -> Array:
        """o [H, D] to [d]: rotated back, projected by groups of heads, then together."""
        o = self.derotate(o, t, freqs)
        groups = o.reshape(self.c.o_groups, -1)
        matrices = np.split(self.w[f"{attn}.wo_a.weight"], self.c.o_groups)
        z = np.concatenate([m @ g for m, g in zip(matrices, groups, strict=True)])
        return self.linear(f"{attn}.wo_b", z)

    def derotate(self, o: Array, t: int, freqs: Array) -> Array:
        return rotate(o, -t, freqs)

    # --- compressed entries: whose, which, and what is in them

    def kv_source(self, layer: int) -> int:
        return max(s for s in self.c.kv_source_layer_ids if s <= layer) if self.c.v41 else layer

    def index_source(self, layer: int) -> int | None:
        """The layer whose choice of entries is used; None: every visible entry is."""
        if self.c.v41:
            return max((s for s in self.c.index_source_layer_ids if s <= layer), default=None)
        return layer if self.c.compress_ratios[layer] == 4 else None

    def complete(self, layer: int, t: int) -> int:
        """How many entries query t can see: those whose last token is not after t."""
        return (t + 1) // self.c.compress_ratios[layer]

    def visible(self, layer: int, t: int) -> list[int]:
        source = self.index_source(layer)
        if source is None:
            return list(range(self.complete(layer, t)))
        return sorted(self.selected[source][t])

    def compress(self, attn: str, x: Vectors, layer: int, freqs: Array) -> None:
        """Makes entries and index keys, where this layer is a source."""
        if self.kv_source(layer) != layer:
            return
        ratio = self.c.compress_ratios[layer]
        has_index = self.index_source(layer) is not None
        self.entries[layer], self.index_keys[layer] = [], []
        for j in range(len(x) // ratio):
            position = self.entry_position(j, ratio)
            if self.c.v41:
                before = self.latent(f"{attn}.compressor", x[j * ratio : (j + 1) * ratio])
                entry = self.store.fp4_e4m3(rotate(before, position, freqs))
            else:
                before = self.pool(f"{attn}.compressor", x, j, ratio)
                entry = self.store_but_tail(rotate(before, position, freqs))
            self.entries[layer].append(entry)
            if has_index:
                if self.c.v41:  # from what the entry was before its rotation
                    key = self.norm(f"{attn}.indexer.k_norm", self.index_projection(attn, before))
                    key = rotate(key, position, freqs)
                else:
                    key = self.pool(f"{attn}.indexer.compressor", x, j, ratio)
                    key = hadamard(self.c.index_head_dim) @ rotate(key, position, freqs)
                self.index_keys[layer].append(self.store.fp4(key, 32))

    def entry_position(self, j: int, ratio: int) -> int:
        """Where an entry stands: at the first token of its group."""
        return j * ratio

    def index_projection(self, attn: str, latent: Array) -> Array:
        return self.w[f"{attn}.indexer.wk.weight"] @ latent

    def latent(self, name: str, group: Vectors) -> Array:
        """V4.1: a gated mean of two tokens, or one token as it is; no overlap, no ape."""
        kv = np.array([self.w[f"{name}.wkv.weight"] @ x for x in group])
        if len(group) > 1:
            gates = np.array([self.w[f"{name}.wgate.weight"] @ x for x in group])
            kv = softmax(gates, axis=0) * kv
        return self.norm(f"{name}.norm", kv.sum(axis=0))

    def pool(self, name: str, x: Vectors, j: int, ratio: int) -> Array:
        """V4: entry j, before rotation. With ratio 4 each token has two halves, of which the
        first enters the next group's entry and the second its own group's."""

        def projected(group: int) -> tuple[Array, Array]:
            tokens = x[group * ratio : (group + 1) * ratio]
            kv = np.array([self.w[f"{name}.wkv.weight"] @ token for token in tokens])
            gates = np.array([self.w[f"{name}.wgate.weight"] @ token for token in tokens])
            return kv, gates + self.w[f"{name}.ape"]

        kv, gates = projected(j)
        if ratio == 4:
            half = kv.shape[1] // 2
            kv, gates = kv[:, half:], gates[:, half:]
            if j > 0:
                kv_before, gates_before = projected(j - 1)
                kv = np.concatenate([kv_before[:, :half], kv])
                gates = np.concatenate([gates_before[:, :half], gates])
        return self.norm(f"{name}.norm", (softmax(gates, axis=0) * kv).sum(axis=0))

    # --- the indexer

    def index(self, attn: str, x: Vectors, latents: Vectors, layer: int, freqs: Array) -> None:
        """Chooses each query's entries, where this layer is a source of choices."""
        if self.index_source(layer) != layer:
            return
        c = self.c
        self.selected[layer] = []
        for t in range(len(x)):
            scores = self.index_scores(attn, x[t], latents[t], layer, t, freqs)
            if layer == c.candidate_source_layer_id:
                self.candidates.append(self.candidate_entries(scores))
            if self.is_restricted(layer):
                scores = [s if j in self.candidates[t] else -math.inf for j, s in enumerate(scores)]
            self.selected[layer].append(best(scores, c.index_topk))

    def is_restricted(self, layer: int) -> bool:
        """Whether the layer chooses among the candidates only; their source itself does not."""
        source = self.c.candidate_source_layer_id
        return source is not None and layer > source

    def index_scores(
        self, attn: str, x: Array, latent: Array, layer: int, t: int, freqs: Array
    ) -> list[float]:
        """One score per visible entry."""
        c, name = self.c, f"{attn}.indexer"
        q = self.linear(f"{name}.wq_b", latent).reshape(c.index_n_heads, c.index_head_dim)
        q = rotate(q, t, freqs)
        if not c.v41:
            q = q @ hadamard(c.index_head_dim)
        q = self.store.fp4(q, 32)
        weights = self.w[f"{name}.weights_proj.weight"] @ x
        weights = weights / math.sqrt(c.index_head_dim * c.index_n_heads)
        keys = self.index_keys[self.kv_source(layer)][: self.complete(layer, t)]
        return [float(weights @ relu(q @ key)) for key in keys]

    def candidate_entries(self, scores: list[float]) -> set[int]:
        """Entries of the best blocks; the block with the newest visible entry is always in."""
        size = self.c.candidate_block_size
        blocks = [max(scores[b : b + size]) for b in range(0, len(scores), size)]
        if blocks:
            blocks[-1] = math.inf
        kept = best(blocks, self.c.candidate_topk_blocks)
        return {j for j in range(len(scores)) if j // size in kept}

    # --- mixture of experts

    def moe(self, ffn: str, x: Array, token: int, layer: int, count: int | None = None) -> Array:
        """x [d] to [d]; `count` experts, the config's unless given."""
        y = self.expert(f"{ffn}.shared_experts", x, 1.0)
        for e, weight in self.route(ffn, x, token, layer, count).items():
            y = y + self.expert(f"{ffn}.experts.{e}", x, weight)
        return y

    def route(
        self, ffn: str, x: Array, token: int, layer: int, count: int | None
    ) -> dict[int, float]:
        """Expert -> weight. The bias has a say in the choice, none in the weight."""
        c = self.c
        scores = np.sqrt(np.logaddexp(0, self.w[f"{ffn}.gate.weight"] @ x))
        if layer < c.num_hash_layers:
            chosen = [int(e) for e in self.w[f"{ffn}.gate.tid2eid"][token]]
        else:
            image = token == c.image_token_id
            biased = list(scores + self.w[f"{ffn}.gate.{'bias_vl' if image else 'bias'}"])
            chosen = sorted(best(biased, count or c.num_experts_per_tok))
        total = sum(scores[e] for e in chosen)
        return {e: scores[e] / total * c.routed_scaling_factor for e in chosen}

    def expert(self, name: str, x: Array, weight: float) -> Array:
        """The routing weight enters before the last matrix, so before its input's round trip."""
        limit = self.c.swiglu_limit
        gate = np.minimum(self.linear(f"{name}.w1", x), limit)
        up = np.clip(self.linear(f"{name}.w3", x), -limit, limit)
        return self.linear(f"{name}.w2", gate * sigmoid(gate) * up * weight)

    # --- Engram

    def engram(self, layer: int, streams: Array, t: int) -> Array:
        """Streams [S, d] with the n-grams' value added to each, through its own gate."""
        c, name = self.c, f"layers.{layer}.engram"
        if self.fold is None:
            raise ValueError("Engram layers need the folding of token ids")
        if self.ids[t] == c.image_token_id:
            return streams
        rows = engram.rows(c, layer, self.ids, self.fold, t)
        looked_up = self.w[f"{name}.embed.weight"][rows].reshape(-1)
        projected = self.linear(f"{name}.wkv", looked_up).reshape(c.hc_mult + 1, -1)
        keys, value = projected[:-1], projected[-1]
        out = []
        for s in range(c.hc_mult):
            weighted = streams[s] * self.w[f"{name}.q_weight"][s] * self.w[f"{name}.k_weight"][s]
            match = (weighted @ keys[s]) / rms(streams[s], c.rms_norm_eps)
            match = match / rms(keys[s], c.rms_norm_eps) / math.sqrt(c.hidden_size)
            out.append(streams[s] + engram_gate(match) * value)
        return np.array(out)
