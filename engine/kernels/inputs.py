"""What lies between a layer's projections and its attention, in one launch for decode rows.

Window keys, compressors, index queries and what attention does to its queries first wait for the
projections and not for each other. Each is small for a few rows, so that what they cost is their
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention import ready_queries_torch
from engine.kernels.attention_kernel import turn_queries_device
from engine.kernels.compress import compress_device, compress_torch, compress_triton
from engine.kernels.index import (
    HEADS,
    index_queries_device,
    index_queries_torch,
    index_queries_triton,
)
from engine.kernels.overlap import FEW_ROWS, await_previous, begin_next, overlapping
from engine.kernels.records import layout_of, rows_like
from engine.kernels.roundtrip import signs_for
from engine.kernels.rows import Rows
from engine.kernels.triton_compat import tl, triton
from engine.kernels.window import window_keys_kernel, window_keys_torch, window_keys_triton
from engine.plan.records import Form

# ---------------------------------------------------------------- torch


@dataclass(frozen=True, slots=True)
class WindowInput:
    """Arguments of window_keys: kv [T, D], norm_w [D], ring [slots, W, ...], form."""

    kv: Tensor
    norm_w: Tensor
    ring: Tensor
    form: Form


@dataclass(frozen=True, slots=True)
class CompressorInput:
    """Arguments of compress that differ between the compressors of a layer."""

    proj: Tensor
    ape: Tensor | None
    state: Tensor | None
    norm_w: Tensor
    form: Form
    pool: Tensor


@dataclass(frozen=True, slots=True)
class QueryInput:
    """Arguments of index_queries: q_raw [T, Hi * Di], head_dim, form.

    Rows that see no more than `idle` entries attend them all; nobody reads what they would ask.
    """

    raw: Tensor
    head_dim: int
    form: Form
    idle: int = 0


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Arguments of ready_queries: raw [T, H * D], H, eps of the head norm or None."""

    raw: Tensor
    heads: int
    eps: float | None


#: Window keys, latents, index queries and queries of attention, as `attention_inputs_torch` gives them.
Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def attention_inputs_torch(
    window: WindowInput,
    compressors: Sequence[CompressorInput],
    queries: QueryInput | None,
    heads: HeadInput,
    rope: Tensor,
    rows: Rows,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    want_latent: bool,
    store: bool,
) -> Inputs:
    """Window keys, compressed entries and index queries of a layer.

    Args:
        window: what the window keys are made of.
        compressors: up to two, the entries' and that of V4's index keys.
        queries: what the index queries are made of, None for a layer that chooses nothing.
        heads: the queries of attention.
        rope: float32 [P, 2, R], of all of them.
        rows: of the pass.
        ratio: tokens per entry.
        overlap: whether entries pool the group before too.
        eps: of all norms.
        want_latent: whether the first compressor's latents are needed.
        store: whether all rows of the pass count: rolling state is stored now, and window keys too
            in a pass of one row a sequence.

    Returns:
        window keys [T, ...] of the pass, latents [T, D] or None, index queries [T, Hi, Di] or None,
        and queries that are ready for attention [T, H * D], None where it shall ready them: in a
        pass of more than one row a sequence.
    """
    k_rows = window_keys_torch(
        window.kv, window.norm_w, eps, rope, rows, window.ring,
        form=window.form, store=store and rows.is_decode,
    )  # fmt: skip
    latents = [
        compress_torch(
            c.proj, c.ape, c.state, rows, ratio=ratio, overlap=overlap, norm_w=c.norm_w, eps=eps,
            rope=rope, form=c.form, pool=c.pool, dtype=window.kv.dtype,
            want_latent=want_latent and i == 0, store=store,
        )
        for i, c in enumerate(compressors)
    ]  # fmt: skip
    turned = None
    if queries is not None:
        turned = index_queries_torch(
            queries.raw, rope, rows, head_dim=queries.head_dim, form=queries.form
        )
    ready = None
    if rows.is_decode:
        ready = ready_queries_torch(heads.raw, heads.heads, heads.eps, rope, rows)
    return k_rows, latents[0] if latents else None, turned, ready


# ---------------------------------------------------------------- Triton


@triton.jit
def _attention_inputs(
    positions, seq, slots, starts, first, tables, table_width, rope, eps,
    kv, kv_stride, kv_norm, k_rows, ring,
    proj_a, stride_a, ape_a, state_a, norm_a, pool_a, signs_a, latent,
    proj_b, stride_b, ape_b, state_b, norm_b, pool_b, signs_b,
    q, q_stride, signs_q, q_out, idle, heads, heads_out, head_eps,
    W: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, WINDOW_FORM: tl.constexpr,
    STORE: tl.constexpr, RATIO: tl.constexpr, PAIRED: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, LATENT: tl.constexpr,
    A: tl.constexpr, D_A: tl.constexpr, RING_A: tl.constexpr, FORM_A: tl.constexpr,
    APE_A: tl.constexpr,
    B: tl.constexpr, D_B: tl.constexpr, RING_B: tl.constexpr, FORM_B: tl.constexpr,
    APE_B: tl.constexpr,
    H: tl.constexpr, D_Q: tl.constexpr, FORM_Q: tl.constexpr, HEADS: tl.constexpr,
    ALL: tl.constexpr, SOME: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (t, role): row t's window key, a compressor's part, some of its queries.

    Of index queries, HEADS of H heads, then of attention's, SOME of ALL.
    """
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    t, role = tl.program_id(0), tl.program_id(1)
    if role == 0:
        window_keys_kernel(
            kv, kv_norm, rope, k_rows, ring, positions, slots, kv_stride, eps,
            W, D, PAIRS, WINDOW_FORM, True, STORE,
        )  # fmt: skip
    if A:  # noqa: SIM102 - decided at compile time, unlike the next one
        if role == 1:
            compress_device(
                t, proj_a, stride_a, ape_a, state_a, positions, seq, slots, starts, first, tables,
                table_width, norm_a, eps, rope, signs_a, pool_a, latent,
                RATIO, PAIRED, D_A, RING_A, PER_BLOCK, PAIRS, FORM_A, APE_A,
                LATENT, STORE and RATIO > 1, CHUNK,
            )  # fmt: skip
    if B:  # noqa: SIM102
        if role == 2:
            compress_device(
                t, proj_b, stride_b, ape_b, state_b, positions, seq, slots, starts, first, tables,
                table_width, norm_b, eps, rope, signs_b, pool_b, latent,
                RATIO, PAIRED, D_B, RING_B, PER_BLOCK, PAIRS, FORM_B, APE_B,
                False, STORE and RATIO > 1, CHUNK,
            )  # fmt: skip
    QUERIES: tl.constexpr = (H + HEADS - 1) // HEADS
    part = role - 1 - A - B
    if part >= QUERIES:
        of_row = t.to(tl.int64) * (ALL * D)
        head = (part - QUERIES) * SOME + tl.arange(0, SOME)
        turn_queries_device(
            heads + of_row, heads_out + of_row, rope, tl.load(positions + t), head, ALL, head_eps,
            D, PAIRS, NORM,
        )  # fmt: skip
    elif H:  # noqa: SIM102 - decided at compile time
        if (part >= 0) & ((tl.load(positions + t) + 1) // RATIO > idle):
            # The last program of a row may overlap the next row's first, and writes the same.
            index_queries_device(
                q, q_stride, rope, positions, signs_q, q_out, t * H + part * HEADS,
                tl.num_programs(0) * H, H, D_Q, PAIRS, FORM_Q, HEADS, 1,
            )  # fmt: skip


def _fields(c: CompressorInput | None, rope: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
    if c is None:
        return (None, 0, None, None, None, None, None)
    dim = c.norm_w.shape[0]
    layout_of(c.pool, c.form, dim, 2 * rope.shape[2], dtype)
    signs = signs_for(c.form, dim, dtype, c.pool.device)
    return c.proj, c.proj.stride(0), c.ape, c.state, c.norm_w, c.pool, signs


def _shape(c: CompressorInput | None, name: str) -> dict[str, object]:
    return {
        name: int(c is not None),
        f"D_{name}": 0 if c is None else c.norm_w.shape[0],
        f"RING_{name}": 1 if c is None or c.state is None else c.state.shape[1],
        f"FORM_{name}": "none" if c is None else c.form,
        f"APE_{name}": c is not None and c.ape is not None,
    }


def attention_inputs_triton(
    window: WindowInput,
    compressors: Sequence[CompressorInput],
    queries: QueryInput | None,
    heads: HeadInput,
    rope: Tensor,
    rows: Rows,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    want_latent: bool,
    store: bool,
) -> Inputs:
    """Do as `attention_inputs_torch`; one launch for decode rows, else one or two for each part."""
    if not rows.is_decode:
        return _apart(
            window, compressors, queries, heads, rope, rows,
            ratio=ratio, overlap=overlap, eps=eps, want_latent=want_latent, store=store,
        )  # fmt: skip
    count, dim = window.kv.shape
    a, b = (*compressors, None, None)[:2]
    layout_of(window.ring, window.form, dim, 2 * rope.shape[2], window.kv.dtype)
    k_rows = rows_like(window.kv, window.form, dim, 2 * rope.shape[2], count)
    q = None
    want_latent = want_latent and a is not None
    latent = window.kv.new_empty((count if want_latent else 0, dim))
    index_heads = head_dim = 0
    signs = None
    if queries is not None:
        signs = signs_for(queries.form, queries.head_dim, queries.raw.dtype, queries.raw.device)
        head_dim = queries.head_dim
        index_heads = queries.raw.shape[1] // head_dim
        q = queries.raw.new_empty((count, index_heads, head_dim))
    ready = torch.empty_like(heads.raw)
    some = 4 if count <= FEW_ROWS else 16
    members = max(1, ratio * (2 if overlap else 1))
    roles = 1 + (a is not None) + (b is not None) + triton.cdiv(index_heads, HEADS)
    roles += triton.cdiv(heads.heads, some)
    _attention_inputs[(count, roles)](
        rows.positions, rows.seq, rows.slots, rows.starts, rows.first, rows.tables,
        rows.tables.shape[1], rope, eps,
        window.kv, window.kv.stride(0), window.norm_w, k_rows, window.ring,
        *_fields(a, rope, window.kv.dtype), latent, *_fields(b, rope, window.kv.dtype),
        None if queries is None else queries.raw, 0 if queries is None else queries.raw.stride(0),
        signs, q, 0 if queries is None else queries.idle, heads.raw, ready, heads.eps or 0.0,
        W=window.ring.shape[1], D=dim, PAIRS=rope.shape[2], WINDOW_FORM=window.form, STORE=store,
        RATIO=ratio, PAIRED=overlap, PER_BLOCK=rows.block_size // max(1, ratio),
        CHUNK=min(members, 8), LATENT=want_latent, **_shape(a, "A"), **_shape(b, "B"),
        H=index_heads, D_Q=head_dim, FORM_Q="none" if queries is None else queries.form,
        HEADS=HEADS, ALL=heads.heads, SOME=some, NORM=heads.eps is not None,
        num_warps=8 if members > 8 else 4, **overlapping(k_rows.device, count),
    )  # fmt: skip
    return k_rows, latent if want_latent else None, q, ready


def _apart(
    window: WindowInput,
    compressors: Sequence[CompressorInput],
    queries: QueryInput | None,
    heads: HeadInput,
    rope: Tensor,
    rows: Rows,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    want_latent: bool,
    store: bool,
) -> Inputs:
    """Each part by a launch of its own, but for the queries of attention."""
    k_rows = window_keys_triton(
        window.kv, window.norm_w, eps, rope, rows, window.ring,
        form=window.form, store=store and rows.is_decode,
    )  # fmt: skip
    latents = [
        compress_triton(
            c.proj, c.ape, c.state, rows, ratio=ratio, overlap=overlap, norm_w=c.norm_w, eps=eps,
            rope=rope, form=c.form, pool=c.pool, dtype=window.kv.dtype,
            want_latent=want_latent and i == 0, store=store,
        )
        for i, c in enumerate(compressors)
    ]  # fmt: skip
    q = None
    if queries is not None:
        q = index_queries_triton(
            queries.raw, rope, rows, head_dim=queries.head_dim, form=queries.form
        )
    return k_rows, latents[0] if latents else None, q, None
