"""Records of cached values: packed by what writes a pool, unpacked by what reads it.

How a record lies in memory stands in engine.plan.records. Values are those of the form's round trip
(engine.kernels.roundtrip), bit for bit; a group with a NaN in it is NaN as a whole. The same on the
device: engine.kernels.record_device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.formats import powers
from engine.kernels.roundtrip import (
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    FP4_AMAX_FLOOR,
    FP4_E4M3_AMAX_FLOOR,
    FP8_AMAX_FLOOR,
    group_amax,
    hadamard_transform,
    power_of_two_at_least,
    round_e2m1,
    to_e4m3,
    to_groups,
)
from engine.plan.records import CHUNK, Form, Record, record_of


def layout_of(pool: Tensor, form: Form, width: int, tail: int, dtype: torch.dtype) -> Record | None:
    """Give the layout of a pool's rows, None for plain numbers.

    Args:
        pool: uint8 [..., nbytes] records, or float [..., width] for form "none".
        form: of its rows.
        width: values of a row.
        tail: rotary dimensions.
        dtype: of activations.

    Raises:
        ValueError: the pool is of another form.
    """
    record = record_of(form, width, tail, dtype.itemsize)
    wanted = width if record is None else record.nbytes
    if pool.shape[-1] != wanted or (pool.dtype == torch.uint8) != (record is not None):
        what = "floating" if record is None else "torch.uint8"
        raise ValueError(
            f"pool: expected {what} rows of {wanted} for {form}, "
            f"got {pool.dtype} rows of {pool.shape[-1]}"
        )
    return record


def rows_like(x: Tensor, form: Form, width: int, tail: int, *shape: int) -> Tensor:
    """Empty memory [*shape, ...] for rows of a form, on x's device; plain ones in x's dtype."""
    record = record_of(form, width, tail, x.itemsize)
    if record is None:
        return x.new_empty((*shape, width))
    return x.new_empty((*shape, record.nbytes), dtype=torch.uint8)


def pack_torch(x: Tensor, form: Form, tail: int = 0) -> Tensor:
    """Rows x [..., n] as they are stored in a form.

    Args:
        x: float32 or bfloat16; the twin of what kernels store.
        form: see engine.plan.records.
        tail: rotary dimensions.

    Returns:
        x itself for form "none", else uint8 [..., nbytes].
    """
    record = record_of(form, x.shape[-1], tail, x.itemsize)
    if record is None:
        return x
    if form == "hadamard_fp4_32":
        x = hadamard_transform(x)
    plain = x[..., : record.width - record.tail]
    codes, scales = (_codes_fp8 if form.startswith("fp8") else _codes_fp4)(plain, record)
    kept = x[..., record.width - record.tail :].contiguous().view(torch.uint8)
    used = record.scales_at + record.num_scales
    filling = codes.new_zeros((*x.shape[:-1], record.nbytes - used))
    return torch.cat((codes, kept, scales, filling), -1)


def unpack_torch(rows: Tensor, form: Form, width: int, tail: int, dtype: torch.dtype) -> Tensor:
    """Values of stored rows; the twin of record_tile_device.

    Args:
        rows: uint8 [..., nbytes]; any floating [..., width] for form "none".
        form: of the rows.
        width: values of a row.
        tail: rotary dimensions.
        dtype: of activations, and of the result; bfloat16 holds all values exactly.

    Returns:
        [..., width].
    """
    record = layout_of(rows, form, width, tail, dtype)
    if record is None:
        return rows.to(dtype)
    codes, at = rows[..., : record.code_bytes], record.scales_at
    scales = rows[..., at : at + record.num_scales]
    if form.startswith("fp8"):
        values = codes.contiguous().view(E4M3).to(torch.float32)
        values = (
            values * powers(scales).repeat_interleave(record.group, -1)[..., : values.shape[-1]]
        )
    else:
        values = _values_fp4(codes, scales, record)
    kept = rows[..., record.code_bytes : at].contiguous().view(dtype)
    return torch.cat((values.to(dtype), kept), -1)


def _exponents(scale: Tensor) -> Tensor:
    """Bytes of power-of-two scales; that of NaN is 255."""
    _, exponent = torch.frexp(scale)
    return torch.where(scale.isnan(), 255, exponent + 126).to(torch.uint8)


def _codes_fp8(x: Tensor, record: Record) -> tuple[Tensor, Tensor]:
    groups = to_groups(x, record.group)
    amax = group_amax(groups, FP8_AMAX_FLOOR)
    scale = power_of_two_at_least(amax / E4M3_MAX)
    codes = to_e4m3(groups / scale).view(torch.uint8).flatten(-2)[..., : x.shape[-1]]
    return codes, _exponents(torch.where(amax.isnan(), amax, scale)).squeeze(-1)


def _codes_fp4(x: Tensor, record: Record) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    groups = to_groups(wide, record.group)
    if record.form == "fp4_e4m3_16":
        amax = group_amax(groups, FP4_E4M3_AMAX_FLOOR)
        narrow = to_e4m3(amax / E2M1_MAX)
        scale, scales = narrow.to(wide.dtype), narrow.view(torch.uint8).squeeze(-1)
        scales = scales.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    else:
        amax = group_amax(groups, FP4_AMAX_FLOOR)
        scale = power_of_two_at_least(amax / E2M1_MAX)
        scales = _exponents(torch.where(amax.isnan(), amax, scale)).squeeze(-1)
    rounded = round_e2m1((groups / scale).nan_to_num(0.0)).flatten(-2)
    size = rounded.abs()
    # 0, .5, 1, 1.5 | 2, 3 | 4, 6: codes in steps of a half, a one and a two.
    code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4))
    code = code.to(torch.uint8) | (torch.signbit(rounded).to(torch.uint8) << 3)
    half = min(CHUNK, x.shape[-1] // 2)
    low, high = code.unflatten(-1, (-1, 2, half)).unbind(-2)
    return (low | (high << 4)).flatten(-2), scales


def _values_fp4(codes: Tensor, scales: Tensor, record: Record) -> Tensor:
    half = min(CHUNK, record.width // 2)
    pairs = codes.unflatten(-1, (-1, half))
    code = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3).to(torch.int32)
    exponent, fraction = (code >> 1) & 3, code & 1
    halves = (fraction + 2 * (exponent > 0)) << (exponent.clamp(min=1) - 1)
    values = torch.where(code > 7, -0.5, 0.5) * halves
    if record.form == "fp4_e4m3_16":
        scales = scales.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        factors = scales.contiguous().view(E4M3).to(torch.float32)
    else:
        factors = powers(scales.contiguous())
    return values * factors.repeat_interleave(record.group, -1)
