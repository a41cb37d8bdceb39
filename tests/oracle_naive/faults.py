"""One planted fault per feature of the forward pass, each a change to the naive run.

A comparison that still holds with a fault planted does not exercise the feature. A fault changes
fields of the config, tensors, or functions (by dotted path). `FAULTS` lists them by the case of
tests/engine/test_naive_agrees.py in which each must be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle_naive import engram, formats, model
from tests.oracle_naive.config import Config
from tests.oracle_naive.formats import Array, RoundTrips
from tests.oracle_naive.model import Mix, Naive, Vectors
from tests.oracle_naive.weights import Weights

MODEL, ENGRAM, WEIGHTS = model.__name__, engram.__name__, "tests.oracle_naive.weights"
NAIVE, STORE = f"{MODEL}.Naive", f"{formats.__name__}.RoundTrips"


def _no_fields(config: Config) -> dict[str, Any]:
    return {}


def _no_tensors(config: Config, weights: Weights) -> dict[str, Array]:
    return {}


@dataclass(frozen=True)
class Fault:
    """What differs from the specification."""

    fields: Callable[[Config], Mapping[str, Any]] = _no_fields
    tensors: Callable[[Config, Weights], Mapping[str, Array]] = _no_tensors
    functions: Mapping[str, Any] = field(default_factory=dict)


def scaled(ending: str, factor: float) -> Callable[[Config, Weights], dict[str, Array]]:
    """All tensors whose name ends so, times a factor."""
    return lambda c, w: {name: w[name] * factor for name in w if name.endswith(ending)}


def copied(source: int, target: int, part: str) -> Callable[[Config, Weights], dict[str, Array]]:
    """A layer gets another one's tensors."""
    head = f"layers.{source}.{part}"
    return lambda c, w: {
        name.replace(f"layers.{source}.", f"layers.{target}.", 1): w[name]
        for name in w
        if name.startswith(head)
    }


# --- replaced functions; the originals are bound here, before anything is patched

_mix, _pool, _route, _expert = Naive.mix, Naive.pool, Naive.route, Naive.expert
_rotate, _history, _fp8 = model.rotate, engram.history, RoundTrips.fp8
_fp4, _fp4_e4m3, _unpack = RoundTrips.fp4, RoundTrips.fp4_e4m3, formats.unpack_e2m1
_multipliers, _table_sizes = engram.multipliers, engram.table_sizes


def comb_not_transposed(self: Naive, name: str, streams: Array) -> Mix:
    mix = _mix(self, name, streams)
    return Mix(mix.pre, mix.post, mix.comb.T)


def post_without_factor(self: Naive, name: str, streams: Array) -> Mix:
    mix = _mix(self, name, streams)
    return Mix(mix.pre, mix.post / 2, mix.comb)


def half_split(x: Array, position: int, freqs: Array) -> Array:
    n = len(freqs)
    order = np.arange(2 * n).reshape(2, n).T.reshape(-1)
    start = x.shape[-1] - 2 * n
    shuffled = np.concatenate([x[..., :start], x[..., start:][..., order]], axis=-1)
    turned = _rotate(shuffled, position, freqs)
    out = turned.copy()
    out[..., start:][..., order] = turned[..., start:]
    return out


def head_norm_always(self: Naive, q: Array) -> Array:
    return np.array([head / model.rms(head, self.c.rms_norm_eps) for head in q])


def one_group_for_all(c: Config, w: Weights) -> dict[str, Array]:
    out = {}
    for name in w:
        if name.endswith("wo_a.weight"):
            first = np.split(w[name], c.o_groups)[0]
            out[name] = np.concatenate([first] * c.o_groups)
    return out


def seen_early(self: Naive, layer: int, t: int) -> int:
    ratio = self.c.compress_ratios[layer]
    return min((t + 2) // ratio, len(self.ids) // ratio)


def pool_without_overlap(self: Naive, name: str, x: Vectors, j: int, ratio: int) -> Array:
    return _pool(self, name, x[j * ratio : (j + 1) * ratio], 0, ratio)


def halves_swapped(c: Config, w: Weights) -> dict[str, Array]:
    out = {}
    for layer, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        if ratio == 4:
            prefix = f"layers.{layer}.attn.compressor"
            for name in (f"{prefix}.wkv.weight", f"{prefix}.wgate.weight"):
                out[name] = np.roll(w[name], len(w[name]) // 2, axis=0)
            ape = w[f"{prefix}.ape"]
            out[f"{prefix}.ape"] = np.roll(ape, ape.shape[1] // 2, axis=1)
    return out


def key_from_rotated_latent(self: Naive, attn: str, latent: Array) -> Array:
    done = len(self.index_keys[layer := max(self.index_keys)])
    ratio = self.c.compress_ratios[layer]
    turned = _rotate(latent, done * ratio, model.rotary_frequencies(self.c, ratio))
    weight: Array = self.w[f"{attn}.indexer.wk.weight"] @ turned
    return weight


def newest_not_forced(self: Naive, scores: list[float]) -> set[int]:
    size = self.c.candidate_block_size
    blocks = [max(scores[b : b + size]) for b in range(0, len(scores), size)]
    kept = model.best(blocks, self.c.candidate_topk_blocks)
    return {j for j in range(len(scores)) if j // size in kept}


def bias_in_weights(
    self: Naive, ffn: str, x: Array, token: int, layer: int, count: int | None
) -> dict[int, float]:
    bias = self.w.get(f"{ffn}.gate.bias", np.zeros(self.c.n_routed_experts))
    scores = np.sqrt(np.logaddexp(0, self.w[f"{ffn}.gate.weight"] @ x)) + bias
    chosen = list(_route(self, ffn, x, token, layer, count))
    total = sum(scores[e] for e in chosen)
    return {e: scores[e] / total * self.c.routed_scaling_factor for e in chosen}


def shared_unclamped(self: Naive, name: str, x: Array, weight: float) -> Array:
    if not name.endswith("shared_experts"):
        return _expert(self, name, x, weight)
    gate, up = self.linear(f"{name}.w1", x), self.linear(f"{name}.w3", x)
    return self.linear(f"{name}.w2", gate * model.sigmoid(gate) * up)


def weight_after_last_matrix(self: Naive, name: str, x: Array, weight: float) -> Array:
    return _expert(self, name, x, 1.0) * weight


def learned_everywhere(c: Config, w: Weights) -> dict[str, Array]:
    return {
        f"layers.{i}.ffn.gate.bias": np.zeros(c.n_routed_experts) for i in range(c.num_hash_layers)
    }


def no_history(c: Config, ids: list[int], fold: list[int], t: int) -> list[int]:
    return _history(c, ids[t : t + 1], fold, 0)


def primes_shared_by_layers(c: Config) -> dict[int, list[list[int]]]:
    return {
        layer: _table_sizes(c.replaced(engram_layer_ids=(layer,)))[layer]
        for layer in c.engram_layer_ids
    }


def value_before_keys(c: Config, w: Weights) -> dict[str, Array]:
    return {
        name: np.roll(w[name], c.hidden_size, axis=0)
        for name in w
        if name.endswith("engram.wkv.weight")
    }


def unrounded_linear(self: Naive, name: str, x: Array) -> Array:
    y: Array = self.w[f"{name}.weight"] @ x
    return y


def linear_in_groups_of(group: int) -> Callable[[Naive, str, Array], Array]:
    def linear(self: Naive, name: str, x: Array) -> Array:
        if f"{name}.weight" in self.w.quantised:
            x = self.store.fp8(x, group)
        y: Array = self.w[f"{name}.weight"] @ x
        return y

    return linear


def rounded_before_wo_a(self: Naive, o: Array, t: int, freqs: Array) -> Array:
    back = _rotate(o, -t, freqs).reshape(self.c.o_groups, -1)
    return self.store.fp8(back, 32 if self.c.v41 else 128).reshape(o.shape)


def stored_whole(self: Naive, k: Array) -> Array:
    return self.store.fp8(k, 64)


def stored_in_groups_of_32(self: Naive, k: Array) -> Array:
    plain = self.c.head_dim - self.c.qk_rope_head_dim
    return np.concatenate([self.store.fp8(k[:plain], 32), k[plain:]])


def window_stored_by(
    store: Callable[[Naive, Array], Array],
) -> Callable[[Naive, str, Array, int, Array], Array]:
    def window_key(self: Naive, attn: str, x: Array, t: int, freqs: Array) -> Array:
        k = self.norm(f"{attn}.kv_norm", self.linear(f"{attn}.wkv", x))
        return store(self, _rotate(k, t, freqs))

    return window_key


def fp4_in_hadamard_order(self: RoundTrips, x: Array, group: int) -> Array:
    h = formats.hadamard(x.shape[-1])
    return _fp4(self, x @ h, group) @ h


def entries_in_groups_of_32(self: RoundTrips, x: Array) -> Array:
    def scale_of(amax: Array) -> Array:
        return formats.to_e4m3(np.maximum(amax, 6 * 2.0**-9) / 6)

    return self._by_group(x, 32, formats.to_e2m1, scale_of)


def fp8_without_floor(self: RoundTrips, x: Array, group: int) -> Array:
    return _fp8(self, x * 2.0**60, group) * 2.0**-60  # a power of two changes nothing else


def fp4_with_higher_floor(self: RoundTrips, x: Array) -> Array:
    return _fp4_e4m3(self, x / 4) * 4


def highest_of_equals(scores: list[float], count: int) -> set[int]:
    finite = [j for j in range(len(scores)) if scores[j] > -math.inf]
    return set(sorted(finite, key=lambda j: (-scores[j], -j))[:count])


def changed(**fields: Any) -> Fault:
    return Fault(fields=lambda c: fields)


def replaced(path: str, function: Any) -> Fault:
    return Fault(functions={path: function})


def tensors(edit: Callable[[Config, Weights], Mapping[str, Array]], **fields: Any) -> Fault:
    return Fault(fields=lambda c: fields, tensors=edit)


BOTH = {
    "comb not transposed": replaced(f"{NAIVE}.mix", comb_not_transposed),
    "post without factor 2": replaced(f"{NAIVE}.mix", post_without_factor),
    "one Sinkhorn iteration fewer": Fault(lambda c: {"hc_sinkhorn_iters": c.hc_sinkhorn_iters - 1}),
    "no hc_eps": changed(hc_eps=0.0),
    "mixing ignores content": tensors(scaled("_fn", 0.0)),
    "another norm eps": Fault(lambda c: {"rms_norm_eps": 1e-20 if c.rms_norm_eps > 1e-9 else 1e-6}),
    "half-split rotation": replaced(f"{MODEL}.rotate", half_split),
    "no YaRN": Fault(lambda c: {"yarn": {**c.yarn, "factor": 1}}),
    "one theta": Fault(lambda c: {"compress_rope_theta": c.rope_theta}),
    "no inverse rotation": replaced(f"{NAIVE}.derotate", lambda self, o, t, freqs: o),
    "window longer by one": Fault(lambda c: {"sliding_window": c.sliding_window + 1}),
    "window shorter by one": Fault(lambda c: {"sliding_window": c.sliding_window - 1}),
    "no sink": tensors(lambda c, w: {n: w[n] - 1e9 for n in w if n.endswith("attn_sink")}),
    "one output group for all": tensors(one_group_for_all),
    "entries seen early": replaced(f"{NAIVE}.complete", seen_early),
    "entries seen late": replaced(
        f"{NAIVE}.complete", lambda self, layer, t: t // self.c.compress_ratios[layer]
    ),
    "entry stands at its last token": replaced(
        f"{NAIVE}.entry_position", lambda self, j, ratio: j * ratio + ratio - 1
    ),
    "index scores without ReLU": replaced(f"{MODEL}.relu", lambda x: x),
    "index weights without sign": tensors(
        lambda c, w: {n: abs(w[n]) for n in w if n.endswith("weights_proj.weight")}
    ),
    "one entry more chosen": Fault(lambda c: {"index_topk": c.index_topk + 1}),
    "routing without bias": tensors(scaled("gate.bias", 0.0)),
    "routing bias in the weights": replaced(f"{NAIVE}.route", bias_in_weights),
    "no routed scaling": changed(routed_scaling_factor=1.0),
    "no clamp": changed(swiglu_limit=1e9),
    "no clamp in the shared expert": replaced(f"{NAIVE}.expert", shared_unclamped),
    "no shared expert": tensors(scaled("shared_experts.w2.weight", 0.0)),
}
V4 = {
    "no head norm of q": replaced(f"{NAIVE}.head_norm", lambda self, q: q),
    "pre of the site before": replaced(f"{NAIVE}.used_pre", lambda self, before, own: before),
    "collapse ignores content": tensors(scaled("hc_head_scale", 0.0)),
    "hash layers routed by score": tensors(learned_everywhere, num_hash_layers=0),
    "no ape": tensors(scaled("attn.compressor.ape", 0.0)),
    "no ape for index keys": tensors(scaled("indexer.compressor.ape", 0.0)),
    "no overlap": replaced(f"{NAIVE}.pool", pool_without_overlap),
    "halves swapped": tensors(halves_swapped),
    "all entries instead of the best": replaced(f"{NAIVE}.index_source", lambda self, layer: None),
}
V41 = {
    "head norm of q": replaced(f"{NAIVE}.head_norm", head_norm_always),
    "pre of this site": replaced(f"{NAIVE}.used_pre", lambda self, before, own: own),
    "collapse by the mean": replaced(
        f"{NAIVE}.collapse", lambda self, name, streams, pre: streams.mean(axis=0)
    ),
    "reader has its own entries, ratio 2": tensors(
        copied(1, 2, "attn"), kv_source_layer_ids=(1, 2, 3, 4)
    ),
    "reader has its own entries, ratio 1": tensors(
        copied(4, 5, "attn"), kv_source_layer_ids=(1, 3, 4, 5)
    ),
    "a source is passed over": changed(kv_source_layer_ids=(1, 4)),
    "reader makes its own choice": tensors(
        copied(1, 2, "attn.indexer"), index_source_layer_ids=(1, 2, 3, 4, 6, 8)
    ),
    "a choice is passed over": changed(index_source_layer_ids=(1, 3, 4, 8)),
    "pair not gated": tensors(scaled("compressor.wgate.weight", 0.0)),
    "index key of the rotated latent": replaced(
        f"{NAIVE}.index_projection", key_from_rotated_latent
    ),
    "no candidates": changed(candidate_source_layer_id=None),
    "one candidate block more": Fault(
        lambda c: {"candidate_topk_blocks": c.candidate_topk_blocks + 1}
    ),
    "other candidate blocks": Fault(lambda c: {"candidate_block_size": c.candidate_block_size + 1}),
    "newest block not forced": replaced(f"{NAIVE}.candidate_entries", newest_not_forced),
    "candidate source restricted too": replaced(
        f"{NAIVE}.is_restricted", lambda self, layer: layer >= self.c.candidate_source_layer_id
    ),
    "no Engram": changed(engram_layer_ids=()),
    "Engram without history": replaced(f"{ENGRAM}.history", no_history),
    "Engram without folding": replaced(
        f"{ENGRAM}.history", lambda c, ids, fold, t: _history(c, ids, range(c.vocab_size), t)
    ),
    "Engram gate without root": replaced(
        f"{MODEL}.engram_gate", lambda match: float(model.sigmoid(np.array(match)))
    ),
    "Engram gate of unweighted streams": tensors(
        lambda c, w: {n: np.ones_like(w[n]) for n in w if n.endswith(("q_weight", "k_weight"))}
    ),
    "Engram multipliers of another layer": replaced(
        f"{ENGRAM}.multipliers", lambda layer, *sizes: _multipliers(layer + 1, *sizes)
    ),
    "Engram primes shared by layers": replaced(f"{ENGRAM}.table_sizes", primes_shared_by_layers),
    "Engram value before keys": tensors(value_before_keys),
}
ROUNDED = {
    "packed FP4 in the other order": replaced(
        f"{WEIGHTS}.unpack_e2m1", lambda packed: _unpack((packed >> 4) | (packed << 4))
    ),
    "scale bytes read as numbers": replaced(
        f"{WEIGHTS}.ue8m0", lambda codes: codes.astype(np.float64)
    ),
    "activations not rounded": replaced(f"{NAIVE}.linear", unrounded_linear),
    "input of wo_a rounded": replaced(f"{NAIVE}.derotate", rounded_before_wo_a),
    "routing weight after the last matrix": replaced(f"{NAIVE}.expert", weight_after_last_matrix),
    "index queries and keys not rounded": replaced(f"{STORE}.fp4", lambda self, x, group: x),
    "index groups of 64": replaced(f"{STORE}.fp4", lambda self, x, group: _fp4(self, x, 64)),
}
V4_ROUNDED = {
    "keys and entries not rounded": replaced(f"{NAIVE}.store_but_tail", lambda self, k: k),
    "window keys not rounded": replaced(f"{NAIVE}.window_key", window_stored_by(lambda self, k: k)),
    "rotary tail rounded too": replaced(f"{NAIVE}.store_but_tail", stored_whole),
    "no Hadamard": replaced(f"{MODEL}.hadamard", np.eye),
}
V41_ROUNDED = {
    "window keys not rounded": replaced(f"{NAIVE}.window_key", window_stored_by(lambda self, k: k)),
    "rotary tail of window keys kept": replaced(
        f"{NAIVE}.window_key", window_stored_by(stored_in_groups_of_32)
    ),
    "entries not rounded": replaced(f"{STORE}.fp4_e4m3", lambda self, x: x),
    "entries with power-of-two scales": replaced(
        f"{STORE}.fp4_e4m3", lambda self, x: _fp4(self, x, 16)
    ),
    "index keys in Hadamard order": replaced(f"{STORE}.fp4", fp4_in_hadamard_order),
}
FAULTS: dict[str, dict[str, Fault]] = {
    "v4": BOTH | V4,
    "v4.1": BOTH | V41,
    "v4 rounded": ROUNDED | V4_ROUNDED,
    "v4.1 rounded": ROUNDED | V41_ROUNDED,
    "v4 outliers": {
        "activation groups of 64": replaced(f"{NAIVE}.linear", linear_in_groups_of(64)),
        "key groups of 32": replaced(f"{NAIVE}.store_but_tail", stored_in_groups_of_32),
    },
    "v4.1 outliers": {
        "activation groups of 64": replaced(f"{NAIVE}.linear", linear_in_groups_of(64)),
        "window key groups of 64": replaced(f"{NAIVE}.window_key", window_stored_by(stored_whole)),
        "entry groups of 32": replaced(f"{STORE}.fp4_e4m3", entries_in_groups_of_32),
    },
    "v4 ties": {"highest of equals": replaced(f"{MODEL}.best", highest_of_equals)},
    "v4.1 ties": {"highest of equals": replaced(f"{MODEL}.best", highest_of_equals)},
    "v4.1 images": {
        "no image tokens": changed(image_token_id=None),
        "images routed with the text bias": tensors(
            lambda c, w: {f"{n}_vl": w[n] for n in w if n.endswith("gate.bias")}
        ),
    },
    "v4.1 tiny values": {
        "no floor of FP8": replaced(f"{STORE}.fp8", fp8_without_floor),
        "higher floor of FP4": replaced(f"{STORE}.fp4_e4m3", fp4_with_higher_floor),
    },
    "v4 ratio 128": {"entries seen early": BOTH["entries seen early"]},
}
