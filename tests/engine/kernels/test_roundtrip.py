"""Round trips on the device against their torch twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels import roundtrip as rt
from engine.kernels.triton_compat import tl, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# N = 16 is shorter than a group of 32 or 64; a tail of 32 leaves a last group of 32 of 64.
SHAPES = [
    ("none", 64, 0),
    ("fp8_64_tail", 512, 64),
    ("fp8_64_tail", 128, 32),
    ("fp8_64_tail", 16, 8),
]
SHAPES += [("fp8_32", 512, 0), ("fp4_e4m3_16", 512, 0), ("fp4_32", 128, 0), ("fp4_32", 16, 0)]


@triton.jit
def apply(x, y, signs, M: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr, TAIL: tl.constexpr):
    """One tile through a form."""
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    matrix = rt.signs_device(signs, FORM, N)
    tl.store(y + at, rt.round_trip_device(tl.load(x + at), FORM, TAIL, matrix))


def on_device(x: Tensor, form: str, tail: int) -> Tensor:
    """Run a form's Triton function on [16, N]."""
    y = torch.full_like(x, float("nan"))
    signs = rt.signs_for(form, x.shape[1], x.dtype, x.device)
    apply[(1,)](x, y, signs, *x.shape, FORM=form, TAIL=tail)
    return y


def awkward(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows [16, N] of wide range, ties, zeros, group maxima at and beside powers of two."""
    g = torch.Generator().manual_seed(columns)
    x = torch.randn(16, columns, generator=g)
    x[1] *= torch.exp2(torch.randint(-30, 30, (columns,), generator=g).float())
    x[2] = torch.randint(-12, 13, (columns,), generator=g) * 0.25  # ties of e2m1 at scale 1
    x[2, ::16] = 6.0
    x[3] = 0.0
    x[4] = x[4] * 1e-30
    x[5] = torch.randint(-896, 897, (columns,), generator=g) * 0.5  # ties of e4m3 at scale 1
    x[5, ::32] = 448.0
    x[6, :] = 448.0 * (1 + torch.randint(-1, 2, (columns,), generator=g) * 2.0**-7)
    x[7, :] = 1.5 * (1 + torch.randint(-1, 2, (columns,), generator=g) * 2.0**-7)
    x[8] *= 2.0**-9
    x[9] *= 1e6
    x[10] = torch.randint(-7, 8, (columns,), generator=g) * 1.25 * 0.25  # ties of an e4m3 scale
    x[10, ::16] = 7.5
    x[11] = 1e-4
    return x.to(dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "columns", "tail"), SHAPES)
def test_device_equals_torch(form, columns, tail, dtype):
    """A form gives other bits in a kernel than in torch."""
    x = awkward(columns, dtype)
    want = rt.round_trip(x, form, tail)
    got = on_device(x, form, tail)
    assert torch.equal(got, want)
    assert torch.equal(got, got.bfloat16().to(dtype)) or form in ("none", "fp8_64_tail")
    assert form == "none" or not torch.equal(got, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hadamard_differs_only_where_a_sum_is_a_tie(dtype):
    """The transform in a kernel is off by more than the order of its sums can make it."""
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    want, got = rt.round_trip(x, "hadamard_fp4_32"), on_device(x, "hadamard_fp4_32", 0)
    assert (got != want).float().mean() < 2e-3
    back = rt.hadamard_transform(rt.hadamard_transform(x.float()))
    assert torch.allclose(back, x.float(), atol=1e-5)
    # Another order of the matrix's rows would go unnoticed by the inverse alone.
    unit = torch.zeros(1, 4)
    unit[0, 1] = 2.0
    assert rt.hadamard_transform(unit).tolist() == [[1.0, -1.0, 1.0, -1.0]]


@triton.jit
def scales(amax, fp8, fp4, N: tl.constexpr):
    """Both kinds of scales of N maxima."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(fp8 + at, rt.fp8_scale_device(tl.load(amax + at)))
    tl.store(fp4 + at, rt.fp4_scale_device(tl.load(amax + at)))


def test_scales_are_those_of_the_quotient():
    """A scale read off the bits differs from the one the rounded quotient gives, at any mantissa."""
    mantissas = torch.arange(0, 1 << 23, 5, dtype=torch.int32)
    edges = torch.tensor([0x400000, 0x600000], dtype=torch.int32)
    near = (edges[:, None] + torch.arange(-64, 65, dtype=torch.int32)).flatten()
    parts = torch.cat((mantissas, near))
    for exponent in (118, 127, 140):  # all above the floors
        bits = parts + (exponent << 23)
        count = len(bits) // 4096 * 4096
        amax = bits[-count:].view(torch.float32).to(DEVICE)
        fp8, fp4 = torch.empty_like(amax), torch.empty_like(amax)
        scales[(count // 4096,)](amax, fp8, fp4, 4096)
        assert torch.equal(fp8, rt.power_of_two_at_least(amax / rt.E4M3_MAX))
        assert torch.equal(fp4, rt.power_of_two_at_least(amax / rt.E2M1_MAX))


def test_nan_stays_visible():
    """A poisoned value comes out of a form as a number."""
    for form, columns, tail in SHAPES:
        x = awkward(columns, torch.float32)
        x[13, 3] = float("nan")
        assert on_device(x, form, tail)[13, 3].isnan(), form


@pytest.mark.parametrize(
    ("form", "columns", "fault"),
    [
        ("fp8_32", 512, lambda x: rt.round_trip_fp8(x, 64)),
        ("fp8_64_tail", 512, lambda x: rt.round_trip_fp8(x, 64)),
        ("fp4_32", 128, lambda x: rt.round_trip_fp4(x, 16)),
        ("fp4_32", 128, lambda x: ties_away(x, 32)),
        ("fp4_e4m3_16", 512, lambda x: rt.round_trip_fp4(x, 16)),
        ("fp4_e4m3_16", 512, lambda x: rt.round_trip_fp4_e4m3(x * (1 + 2.0**-23), 16)),
    ],
)
def test_planted_faults_show(form, columns, fault):
    """A wrong group, tail, scale or tie rule passes for the right one."""
    x = awkward(columns, torch.float32)
    assert not torch.equal(on_device(x, form, 64), fault(x))


def ties_away(x: Tensor, group: int) -> Tensor:
    """FP4 with ties rounded away from zero instead of to even."""
    groups = rt.to_groups(x, group)
    scale = rt.power_of_two_at_least(rt.group_amax(groups, rt.FP4_AMAX_FLOOR) / rt.E2M1_MAX)
    values = torch.tensor(rt.E2M1_VALUES, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    code = torch.bucketize((groups / scale).abs(), middles, right=True)
    return (torch.copysign(values[code], groups) * scale).flatten(-2)


def test_an_unknown_form_is_refused():
    """A misspelt form is taken for one that exists."""
    with pytest.raises(ValueError, match="fp8_16"):
        rt.round_trip(torch.zeros(1, 16), "fp8_16")  # type: ignore[arg-type]
