"""Round trips: what values look like after having been stored in a narrow format.

Quantise, then dequantise, in the caller's dtype. Rounding is to nearest, ties to even, with
saturation. Each rule exists as a torch function over the last dimension, whose last group may be
short, and as a Triton function over the last axis of a tile [M, N]; both give equal bits.
Source of the rules: model.md 2.1, 2.4, 2.6 and 2.9.

A *form* names how one kind of value is stored:

| form | rule | stored so |
|---|---|---|
| none | as it is | checkpoints without quantisation |
| fp8_64_tail | e4m3, groups of 64, the rotary tail as it is | V4's window and entries |
| fp8_32 | e4m3, groups of 32 | V4.1's window |
| fp4_e4m3_16 | e2m1, groups of 16, e4m3 scales | V4.1's entries |
| fp4_32 | e2m1, groups of 32 | V4.1's index queries and keys |
| hadamard_fp4_32 | Hadamard transform before fp4_32 | V4's index queries and keys |

Scales are powers of two where nothing else is said. Values of every form are exact in bfloat16.
"""

from __future__ import annotations

import functools
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.triton_compat import cast, dot, tl, triton
from engine.plan.records import Form

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

# ---------------------------------------------------------------- torch


def power_of_two_at_least(x: Tensor) -> Tensor:
    """Smallest power of two >= x, elementwise, exact; x positive and finite."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 code, saturating at +-448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value, ties to the even code, saturating at +-6."""
    magnitude = x.abs()
    # Between neighbouring values the step is 0.5 below 2, 1 below 4 and 2 from 4 on.
    step = 0.5 + 0.5 * (magnitude >= 2) + 1.0 * (magnitude >= 4)
    rounded = (torch.round(magnitude / step) * step).clamp(max=E2M1_MAX)
    return torch.copysign(rounded, x).to(x.dtype)  # step is float32 at least; codes fit any dtype


def to_groups(x: Tensor, group: int) -> Tensor:
    """Split [..., n] into [..., ceil(n / group), group], padding a short last group with zeros."""
    short = -x.shape[-1] % group
    padded = F.pad(x, (0, short)) if short else x
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // group, group)


def group_amax(groups: Tensor, floor: float) -> Tensor:
    """Largest magnitude of each group [..., G, 1], at least `floor`."""
    return groups.abs().amax(-1, keepdim=True).clamp(min=floor)


def round_trip_fp8(x: Tensor, group: int) -> Tensor:
    """Store x [..., n] as e4m3 with one power-of-two scale per `group` and read it back.

    Activations into FP8 linears (group 128 in V4, 32 in V4.1) and window or compressed KV.
    """
    groups = to_groups(x, group)
    scale = power_of_two_at_least(group_amax(groups, FP8_AMAX_FLOOR) / E4M3_MAX)
    stored = to_e4m3(groups / scale).to(x.dtype) * scale
    return stored.flatten(-2)[..., : x.shape[-1]]


def round_trip_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Store x [..., n] as e2m1 with one power-of-two scale per `group` and read it back."""
    groups = to_groups(x, group)
    scale = power_of_two_at_least(group_amax(groups, FP4_AMAX_FLOOR) / E2M1_MAX)
    return (round_e2m1(groups / scale) * scale).flatten(-2)[..., : x.shape[-1]]


def round_trip_fp4_e4m3(x: Tensor, group: int = 16) -> Tensor:
    """Store x [..., n] as e2m1 with one e4m3 scale per `group` (V4.1's compressed KV).

    The quotients are taken in float32 at least: a narrower one would round twice.
    """
    groups = to_groups(x if x.dtype == torch.float64 else x.float(), group)
    scale = to_e4m3(group_amax(groups, FP4_E4M3_AMAX_FLOOR) / E2M1_MAX).to(groups.dtype)
    stored = round_e2m1(groups / scale) * scale
    return stored.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply [..., n] by the orthonormal Hadamard matrix (Sylvester order); n a power of two.

    Sums in float32 at least; the result is rounded to x's dtype.
    """
    width = x.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    signs = torch.ones(1, 1, dtype=wide.dtype, device=x.device)
    while signs.shape[0] < width:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    gain: float = width**-0.5
    return ((wide @ signs) * gain).to(x.dtype)


def round_trip(x: Tensor, form: Form, tail: int = 0) -> Tensor:
    """Values x [..., n] as they are after storage in `form`.

    Args:
        x: floating.
        form: see the module's table.
        tail: last dimensions that fp8_64_tail leaves alone (the rotary ones).

    Raises:
        ValueError: no such form.
    """
    if form == "none":
        return x
    if form == "fp8_64_tail":
        plain = x.shape[-1] - tail
        return torch.cat((round_trip_fp8(x[..., :plain], 64), x[..., plain:]), -1)
    if form == "fp8_32":
        return round_trip_fp8(x, 32)
    if form == "fp4_e4m3_16":
        return round_trip_fp4_e4m3(x, 16)
    if form == "fp4_32":
        return round_trip_fp4(x, 32)
    if form == "hadamard_fp4_32":
        return round_trip_fp4(hadamard_transform(x), 32)
    raise ValueError(f"form: expected one of {', '.join(get_args(Form))}, got {form!r}")


# ---------------------------------------------------------------- Triton
# Arithmetic on float32 bit patterns: exact, the same on every target and in the interpreter.


@triton.jit
def _binade(x):
    """The power of two at or below |x|, float32; 0 below the smallest normal."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _to_step(x, step):
    """Nearest multiple of step, ties to even; |x| < 2**22 steps, step a power of two."""
    # The sum's last bit is worth one step, so that the addition does the rounding.
    shift = step * 12582912.0
    return (x + shift) - shift


@triton.jit
def fp8_scale_device(amax):
    """Power of two of an FP8 group, as round_trip_fp8 has it: amax float32, at least its floor.

    448 is 1.75 * 2**8, so the power at or above amax / 448 follows from amax's exponent, one more
    where its mantissa exceeds 1.75 (a quotient rounded to float32 never hides that it does). A
    division would be long code that runs once.
    """
    bits = amax.to(tl.int32, bitcast=True)
    return (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def fp4_scale_device(amax):
    """Power of two of an FP4 group, as round_trip_fp4 has it; 6 is 1.5 * 2**2."""
    bits = amax.to(tl.int32, bitcast=True)
    return (((bits + 0x3FFFFF) & 0x7F800000) - (2 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_device(scale):
    """1 / scale, exact, of a normal power of two up to 2**126."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3_device(x):
    """Nearest e4m3 value of float32 |x| <= 464 (larger ones saturate); NaN stays NaN."""
    rounded = _to_step(x, tl.maximum(_binade(x), 0.015625) * 0.125)
    rounded = tl.where(rounded > 448.0, 448.0, rounded)
    return tl.where(rounded < -448.0, -448.0, rounded)


@triton.jit
def round_e2m1_device(x):
    """Nearest e2m1 value of float32 x, saturating at +-6; NaN stays NaN."""
    rounded = _to_step(x, tl.maximum(_binade(x), 1.0) * 0.5)
    rounded = tl.where(rounded > 6.0, 6.0, rounded)
    return tl.where(rounded < -6.0, -6.0, rounded)


@triton.jit
def fp8_device(x, GROUP: tl.constexpr, TAIL: tl.constexpr):
    """round_trip_fp8 of a float32 tile [M, N]; the last TAIL columns stay as they are."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    G: tl.constexpr = GROUP if GROUP < N else N
    groups = tl.reshape(x, (M, N // G, G))
    column = tl.arange(0, N // G)[:, None] * G + tl.arange(0, G)[None, :]
    stored = (column < N - TAIL)[None, :, :]
    amax = tl.max(tl.where(stored, tl.abs(groups), 0.0), axis=2)
    scale = fp8_scale_device(tl.maximum(amax, 1e-4))[:, :, None]
    rounded = round_e4m3_device(groups * reciprocal_device(scale)) * scale
    return tl.reshape(tl.where(stored, rounded, groups), (M, N))


@triton.jit
def fp4_device(x, GROUP: tl.constexpr):
    """round_trip_fp4 of a float32 tile [M, N]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    G: tl.constexpr = GROUP if GROUP < N else N
    groups = tl.reshape(x, (M, N // G, G))
    amax = tl.max(tl.abs(groups), axis=2)
    floor: tl.constexpr = 6.0 * 2.0**-126
    scale = fp4_scale_device(tl.maximum(amax, floor))[:, :, None]
    return tl.reshape(round_e2m1_device(groups * reciprocal_device(scale)) * scale, (M, N))


@triton.jit
def fp4_e4m3_device(x, GROUP: tl.constexpr):
    """round_trip_fp4_e4m3 of a float32 tile [M, N]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    G: tl.constexpr = GROUP if GROUP < N else N
    groups = tl.reshape(x, (M, N // G, G))
    amax = tl.max(tl.abs(groups), axis=2)
    floor: tl.constexpr = 6.0 * 2.0**-9
    ratio = tl.div_rn(tl.maximum(amax, floor), tl.full(amax.shape, 6.0, tl.float32))
    scale = round_e4m3_device(tl.minimum(ratio, 448.0))[:, :, None]
    # A true quotient: it may lie exactly between two codes.
    quotient = tl.div_rn(groups, tl.broadcast_to(scale, groups.shape))
    return tl.reshape(round_e2m1_device(quotient) * scale, (M, N))


@functools.cache
def hadamard_signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix times sqrt(width), +-1, [width, width]."""
    at = torch.arange(width, device=device)
    shared = at[:, None] & at
    odd = sum((shared >> bit) & 1 for bit in range(width.bit_length())) % 2
    return (1 - 2 * torch.as_tensor(odd, device=device)).to(dtype)


def signs_for(form: Form, width: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What signs_device reads; None but for the form with the transform."""
    return hadamard_signs(width, dtype, device) if form == "hadamard_fp4_32" else None


@triton.jit
def signs_device(signs, FORM: tl.constexpr, N: tl.constexpr):
    """The matrix that round_trip_device wants for rows of N, read once; None for other forms.

    Args:
        signs: pointer to signs_for's matrix. Working it out would be more code, and longer, than
            reading it from the cache.
        FORM: the form.
        N: width.
    """
    if FORM == "hadamard_fp4_32":
        matrix = tl.load(signs + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    else:
        matrix = None
    return matrix


@triton.jit
def hadamard_device(x, matrix):
    """hadamard_transform of a tile [M, N] in its own dtype; matrix: see signs_device."""
    N: tl.constexpr = x.shape[1]
    gain: tl.constexpr = N**-0.5
    return cast(dot(x, matrix, tl.zeros(x.shape, tl.float32)) * gain, x.dtype)


@triton.jit
def round_trip_device(x, FORM: tl.constexpr, TAIL: tl.constexpr = 0, matrix=None):
    """round_trip of a tile [M, N] in its own dtype (float32 or bfloat16); M, N powers of two.

    The form with the transform needs what signs_device gives.
    """
    if FORM == "none":
        result = x
    elif FORM == "fp8_64_tail":
        result = fp8_device(x.to(tl.float32), 64, TAIL).to(x.dtype)
    elif FORM == "fp8_32":
        result = fp8_device(x.to(tl.float32), 32, 0).to(x.dtype)
    elif FORM == "fp4_e4m3_16":
        result = fp4_e4m3_device(x.to(tl.float32), 16).to(x.dtype)
    elif FORM == "fp4_32":
        result = fp4_device(x.to(tl.float32), 32).to(x.dtype)
    else:
        tl.static_assert(FORM == "hadamard_fp4_32", "no such form")
        result = fp4_device(hadamard_device(x, matrix).to(tl.float32), 32).to(x.dtype)
    return result
