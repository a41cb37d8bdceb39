"""Number formats: FP8 e4m3, FP4 e2m1 and power-of-two scales, as codecs and as round trips.

A *codec* packs and unpacks checkpoint tensors. A *round trip* is what a value looks like after
having been stored; those are defined in engine.kernels.roundtrip. Rounding is to nearest, ties to
even, with saturation. Every function works on the last dimension in groups; a last group may be
short. Source of the rules: model.md 2.1, 2.4, 2.6, 2.9 and 5.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.formats import powers as from_ue8m0
from engine.kernels.roundtrip import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3,
    E4M3_MAX,
    FP4_AMAX_FLOOR,
    group_amax,
    power_of_two_at_least,
    round_e2m1,
    round_trip_fp4,
    round_trip_fp4_e4m3,
    round_trip_fp8,
    to_e4m3,
    to_groups,
)

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3",
    "E4M3_MAX",
    "FP4_AMAX_FLOOR",
    "dequantise_fp4",
    "dequantise_fp8",
    "dequantise_rows_fp8",
    "from_e2m1",
    "from_ue8m0",
    "power_of_two_at_least",
    "quantise_fp4",
    "quantise_fp8",
    "quantise_rows_fp8",
    "round_trip_fp4",
    "round_trip_fp4_e4m3",
    "round_trip_fp8",
    "to_e2m1",
    "to_e4m3",
    "to_ue8m0",
]

_WEIGHT_AMAX_FLOOR = E4M3_MAX * 2.0**-126


def to_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 code (uint8, 0..15), ties to the even code, saturating at +-6."""
    rounded = round_e2m1(x).abs()
    code = torch.bucketize(rounded, torch.tensor(E2M1_VALUES, dtype=x.dtype, device=x.device))
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def from_e2m1(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e2m1 codes (uint8, 0..15)."""
    signed = (*E2M1_VALUES, *(-v for v in E2M1_VALUES))
    return torch.tensor(signed, dtype=dtype, device=code.device)[code.long()]


def to_ue8m0(scale: Tensor) -> Tensor:
    """Bytes of power-of-two scales, as float8_e8m0fnu; exact for powers of two."""
    _, exponent = torch.frexp(scale)
    return (exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantise_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pack a matrix into e4m3 with one scale per block x block square.

    Args:
        weight: [rows, columns] float.
        block: side of the square; the last one may be short.

    Returns:
        e4m3 [rows, columns] and float8_e8m0fnu [ceil(rows / block), ceil(columns / block)].
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    tall, wide = padded.shape
    squares = padded.reshape(tall // block, block, wide // block, block)
    amax = squares.abs().amax((1, 3)).clamp(min=_WEIGHT_AMAX_FLOOR)
    scale = power_of_two_at_least(amax / E4M3_MAX)
    quantised = to_e4m3(weight.float() / _spread(scale, block, rows, columns))
    return quantised, to_ue8m0(scale)


def dequantise_fp8(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    """Float32 values of an e4m3 matrix with block scales (inverse of quantise_fp8)."""
    rows, columns = weight.shape
    return weight.to(torch.float32) * _spread(from_ue8m0(scale), block, rows, columns)


def _spread(scale: Tensor, block: int, rows: int, columns: int) -> Tensor:
    whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return whole[:rows, :columns]


def quantise_rows_fp8(table: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Pack rows into e4m3 with one scale per `group` of each row (Engram tables)."""
    groups = to_groups(table.float(), group)
    scale = power_of_two_at_least(group_amax(groups, _WEIGHT_AMAX_FLOOR) / E4M3_MAX)
    quantised = (groups / scale).flatten(-2)[..., : table.shape[-1]]
    return to_e4m3(quantised), to_ue8m0(scale.squeeze(-1))


def dequantise_rows_fp8(rows: Tensor, scale: Tensor, group: int) -> Tensor:
    """Float32 values of e4m3 rows with group scales (inverse of quantise_rows_fp8)."""
    spread = from_ue8m0(scale).repeat_interleave(group, -1)
    return rows.to(torch.float32) * spread[..., : rows.shape[-1]]


def quantise_fp4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Pack a matrix into e2m1, two values per byte, with one scale per `group` of a row.

    Args:
        weight: [rows, columns] float, columns divisible by `group`.
        group: columns per scale.

    Returns:
        int8 [rows, columns // 2] (low nibble = even column) and float8_e8m0fnu
        [rows, columns // group].

    Raises:
        ValueError: columns are not divisible by `group`.
    """
    if weight.shape[-1] % group:
        raise ValueError(f"expected columns divisible by {group}, got {weight.shape[-1]}")
    groups = to_groups(weight.float(), group)
    scale = power_of_two_at_least(group_amax(groups, FP4_AMAX_FLOOR) / E2M1_MAX)
    code = to_e2m1(groups / scale).flatten(-2)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)
    return packed, to_ue8m0(scale.squeeze(-1))


def dequantise_fp4(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """Float32 values of packed e2m1 rows with group scales (inverse of quantise_fp4)."""
    code = packed.view(torch.uint8)
    values = from_e2m1(torch.stack((code & 15, code >> 4), -1)).flatten(-2)
    return values * from_ue8m0(scale).repeat_interleave(group, -1)
