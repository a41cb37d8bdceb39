"""Number formats: FP8 e4m3, FP4 e2m1 and power-of-two scales, as codecs and as round trips.

A *codec* packs and unpacks checkpoint tensors. A *round trip* is what a value looks like after
having been stored: quantise, then dequantise, in the caller's dtype. Rounding is to nearest, ties
to even, with saturation. Every function works on the last dimension in groups; a last group may be
short. Source of the rules: model.md 2.1, 2.4, 2.6, 2.9 and 5.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: Magnitudes of the eight e2m1 codes; bit 3 of a code is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Smallest amax of an FP8 activation or cache group; keeps scales away from zero.
FP8_AMAX_FLOOR = 1e-4
#: Smallest amax of an FP4 group with a power-of-two scale: its scale is the smallest normal float.
FP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126
#: Smallest amax of an FP4 group with an e4m3 scale: its scale is e4m3's smallest subnormal.
FP4_E4M3_AMAX_FLOOR = E2M1_MAX * 2.0**-9
_WEIGHT_AMAX_FLOOR = E4M3_MAX * 2.0**-126


def power_of_two_at_least(x: Tensor) -> Tensor:
    """Smallest power of two >= x, elementwise, exact; x positive and finite."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 code, saturating at +-448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def to_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 code (uint8, 0..15), ties to the even code, saturating at +-6."""
    magnitude = x.abs()
    # Between neighbouring values the step is 0.5 below 2, 1 below 4 and 2 from 4 on.
    step = 0.5 + 0.5 * (magnitude >= 2) + 1.0 * (magnitude >= 4)
    rounded = (torch.round(magnitude / step) * step).clamp(max=E2M1_MAX)
    code = torch.bucketize(rounded, torch.tensor(E2M1_VALUES, dtype=x.dtype, device=x.device))
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def from_e2m1(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e2m1 codes (uint8, 0..15)."""
    signed = (*E2M1_VALUES, *(-v for v in E2M1_VALUES))
    return torch.tensor(signed, dtype=dtype, device=code.device)[code.long()]


def from_ue8m0(byte: Tensor) -> Tensor:
    """Float32 values 2**(byte - 127) of scale bytes (uint8 or float8_e8m0fnu); 255 is NaN."""
    return byte.view(torch.float8_e8m0fnu).to(torch.float32)


def to_ue8m0(scale: Tensor) -> Tensor:
    """Bytes of power-of-two scales, as float8_e8m0fnu; exact for powers of two."""
    _, exponent = torch.frexp(scale)
    return (exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu)


def _grouped(x: Tensor, group: int) -> Tensor:
    """Split [..., n] into [..., ceil(n / group), group], padding a short last group with zeros."""
    short = -x.shape[-1] % group
    padded = F.pad(x, (0, short)) if short else x
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // group, group)


def _amax(groups: Tensor, floor: float) -> Tensor:
    return groups.abs().amax(-1, keepdim=True).clamp(min=floor)


def round_trip_fp8(x: Tensor, group: int) -> Tensor:
    """Store x [..., n] as e4m3 with one power-of-two scale per `group` and read it back.

    Activations into FP8 linears (group 128 in V4, 32 in V4.1) and window or compressed KV.
    """
    groups = _grouped(x, group)
    scale = power_of_two_at_least(_amax(groups, FP8_AMAX_FLOOR) / E4M3_MAX)
    stored = to_e4m3(groups / scale).to(x.dtype) * scale
    return stored.flatten(-2)[..., : x.shape[-1]]


def round_trip_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Store x [..., n] as e2m1 with one power-of-two scale per `group` and read it back."""
    groups = _grouped(x, group)
    scale = power_of_two_at_least(_amax(groups, FP4_AMAX_FLOOR) / E2M1_MAX)
    return _fp4(groups, scale, x)


def round_trip_fp4_e4m3(x: Tensor, group: int = 16) -> Tensor:
    """Store x [..., n] as e2m1 with one e4m3 scale per `group` (V4.1's compressed KV)."""
    groups = _grouped(x, group)
    scale = to_e4m3(_amax(groups, FP4_E4M3_AMAX_FLOOR) / E2M1_MAX).to(x.dtype)
    return _fp4(groups, scale, x)


def _fp4(groups: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    stored = from_e2m1(to_e2m1(groups / scale), like.dtype) * scale
    return stored.flatten(-2)[..., : like.shape[-1]]


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
    groups = _grouped(table.float(), group)
    scale = power_of_two_at_least(_amax(groups, _WEIGHT_AMAX_FLOOR) / E4M3_MAX)
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
    groups = _grouped(weight.float(), group)
    scale = power_of_two_at_least(_amax(groups, FP4_AMAX_FLOOR) / E2M1_MAX)
    code = to_e2m1(groups / scale).flatten(-2)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)
    return packed, to_ue8m0(scale.squeeze(-1))


def dequantise_fp4(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """Float32 values of packed e2m1 rows with group scales (inverse of quantise_fp4)."""
    code = packed.view(torch.uint8)
    values = from_e2m1(torch.stack((code & 15, code >> 4), -1)).flatten(-2)
    return values * from_ue8m0(scale).repeat_interleave(group, -1)
