"""Attention of a backbone layer over packed weights: window, entries and the choice among them.

Sections 2.4 to 2.6 and 2.9 of model.md. Compressors' entries and index keys of a KV source are
written on the way, or ahead of it for all rows where the layer itself processes fewer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.config import Layer
from engine.kernels.formats import Matrix
from engine.kernels.inputs import CompressorInput, HeadInput, QueryInput, WindowInput
from engine.kernels.mhc import HcIn
from engine.model.flow import Flow, Pass
from engine.model.packed import PackedLayer

if TYPE_CHECKING:
    from engine.model.fast import FastModel


def attention(model: FastModel, layer: Layer, w: PackedLayer, site: HcIn, state: Pass) -> Tensor:
    """Attention of a layer; stores what the pass adds to the layer's memory, or holds it back.

    Args:
        model: the backbone.
        layer: what the layer is.
        w: its weights.
        site: that is open.
        state: the pass. The entries chosen by a layer that owns an index are left in it.

    Returns:
        summands of the sublayer's output [T, P, d].
    """
    c, k, rows, pool = model.config, model.ops, state.rows, state.pool
    a = w.attn
    rope = model.compressed_rope if layer.ratio else model.plain_rope
    inputs, weights = [site.xq], [a.wq_a_wkv]
    kinds: list[torch.dtype | None] = [None]
    writes = layer.index != state.written
    for extra in _extra_projections(w, writes=writes):
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
        act_group=model.act_group,
        wanted=(rows.positions, (idle + 1) * layer.ratio - 1) if a.indexer and idle else None,
    )
    ring = pool.window[layer.index]
    compressors = _compressors(model, layer, w, extras, state) if writes else []
    kept = state.held is None
    head_norm = None if c.is_v41 else c.rms_norm_eps
    k_rows, latent, chooser, ready = k.attention_inputs(
        WindowInput(projected[:, c.q_lora_rank :], a.kv_norm, ring, model.forms.window),
        compressors,
        QueryInput(index_q[0], c.index_head_dim, model.forms.index, idle) if index_q else None,
        HeadInput(q, a.sink.shape[0], head_norm),
        rope,
        rows,
        ratio=layer.ratio,
        overlap=layer.overlap,
        eps=c.rms_norm_eps,
        want_latent=writes and _wants_latent(w),
        store=kept,
    )
    if not kept:
        _hold_state(model, layer, compressors, state)
    if latent is not None:
        _index_keys(model, layer, w, latent, state)
    if layer.owns_index:
        _choose(model, layer, chooser, extras[-1], state)
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
        scale=c.head_dim**-0.5,
        window_form=model.forms.window,
        entry_form=model.forms.entries,
        ready=ready is not None,
    )
    if not rows.is_decode or state.held is not None:
        state.store(partial(k.store_window, k_rows, rows, ring))
    return k.attention_output(o, a.wo_a, a.wo_b, c.o_groups, act_group=model.act_group)


def write_entries(
    model: FastModel, layer: Layer, w: PackedLayer, before: Flow, state: Pass
) -> None:
    """Write a KV source's entries and index keys of all rows, before some are left out."""
    _, site = model.turn(before.streams, before.parts, before.site, w.attn_site)
    extras = _extra_projections(w)
    projected = model.ops.linears(
        [site.x] * len(extras), extras, out_dtypes=[torch.float32] * len(extras)
    )
    latent: Tensor | None = None
    for number, one in enumerate(_compressors(model, layer, w, list(projected), state)):
        found = model.ops.compress(
            one.proj,
            one.ape,
            one.state,
            state.rows,
            ratio=layer.ratio,
            overlap=layer.overlap,
            norm_w=one.norm_w,
            eps=model.config.rms_norm_eps,
            rope=model.compressed_rope,
            form=one.form,
            pool=one.pool,
            dtype=model.dtype,
            want_latent=not number and _wants_latent(w),
            store=True,
        )
        latent = latent if found is None else found
    if latent is not None:
        _index_keys(model, layer, w, latent, state)
    state.written = layer.index


def _wants_latent(w: PackedLayer) -> bool:
    """Whether index keys are made of the latent, as in V4.1."""
    return w.attn.index_keys is not None and w.attn.index_keys.wk is not None


def _extra_projections(w: PackedLayer, *, writes: bool = True) -> list[Matrix]:
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
    model: FastModel, layer: Layer, w: PackedLayer, extras: list[Tensor], state: Pass
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
                model.forms.entries,
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
                model.forms.index,
                pool.index_keys[at],
            )
        )
    return found


def _hold_state(
    model: FastModel, layer: Layer, compressors: list[CompressorInput], state: Pass
) -> None:
    """Put off what the compressors keep of this pass's rows."""
    assert state.held is not None
    for one in compressors:
        if one.state is not None:
            keep = partial(
                model.ops.store_state,
                one.proj,
                one.ape,
                one.state,
                state.rows,
                ratio=layer.ratio,
            )
            state.held.add(keep)


def _index_keys(
    model: FastModel, layer: Layer, w: PackedLayer, latent: Tensor, state: Pass
) -> None:
    """Write V4.1's index keys of the groups that this pass completes (2.9)."""
    keys = w.attn.index_keys
    assert keys is not None
    assert keys.wk is not None
    model.ops.index_keys_from_latent(
        latent,
        keys.wk,
        keys.norm,
        model.config.rms_norm_eps,
        model.compressed_rope,
        state.rows,
        state.pool.index_keys[layer.index],
        ratio=layer.ratio,
        form=model.forms.index,
    )


def _choose(
    model: FastModel, layer: Layer, q: Tensor | None, head_weights: Tensor, state: Pass
) -> None:
    """Choose the entries that this layer and its readers attend (2.6, 2.9)."""
    c = model.config
    assert layer.kv_source is not None
    assert q is not None
    places, candidates = model.ops.choose(
        q,
        head_weights,
        state.pool.index_keys[layer.kv_source],
        state.rows,
        ratio=layer.ratio,
        topk=c.index_topk,
        key_form=model.forms.index,
        candidates=state.candidates if layer.reads_candidates else None,
        candidate_group=c.candidate_block_size,
        candidate_topk=c.candidate_topk_blocks if layer.builds_candidates else 0,
    )
    state.choices[layer.index] = places
    if layer.builds_candidates:
        state.candidates = candidates
