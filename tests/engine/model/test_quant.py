"""Number formats against exhaustive tables and rules worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st

from engine.model import quant


def e4m3_value(code: int) -> float:
    """Value of an e4m3 code from its bits: 4 exponent bits of bias 7, 3 fraction bits, no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


E4M3 = [e4m3_value(code) for code in range(256)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x: float, values: list[float]) -> float:
    """Nearest of an ascending list by brute force; a tie goes to the even place, as codes do."""
    return min(enumerate(values), key=lambda item: (abs(item[1] - x), item[0] % 2))[1]


def test_every_e4m3_code_has_its_value():
    """The 256 codes read as the format says, NaN at 0x7f and 0xff."""
    codes = torch.arange(256, dtype=torch.uint8).view(quant.E4M3).float()

    assert torch.equal(codes.nan_to_num(999), torch.tensor(E4M3).nan_to_num(999))


def test_e4m3_rounds_to_nearest_even_and_saturates():
    """Every code, every midpoint of neighbours and values beyond the range go where they must."""
    finite = sorted(v for v in E4M3[:128] if not math.isnan(v))
    halfway = [(a + b) / 2 for a, b in itertools.pairwise(finite)]
    x = torch.tensor([*finite, *halfway, 449.0, 1e6, math.inf])

    want = [*finite, *(nearest(h, finite) for h in halfway), 448.0, 448.0, 448.0]
    assert quant.to_e4m3(x).float().tolist() == want
    assert quant.to_e4m3(-x).float().tolist() == [-v for v in want]
    assert quant.to_e4m3(torch.tensor([math.nan])).float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_e2m1_code_has_its_value_and_ties_go_to_even(dtype):
    """The 16 codes, the midpoints between them, and saturation at 6."""
    assert quant.from_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == E2M1 + [
        -v for v in E2M1
    ]
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([*E2M1, *halfway, 5.01, 7.0, 1e30], dtype=dtype)
    want = [*range(8), 0, 2, 2, 4, 4, 6, 6, 7, 7, 7]

    assert quant.to_e2m1(x).tolist() == want
    assert quant.to_e2m1(-x).tolist() == [code + 8 for code in want]
    assert want[8:15] == [E2M1.index(nearest(h, E2M1)) for h in halfway]


def test_every_scale_byte_is_a_power_of_two_and_255_is_nan():
    """Byte e stands for 2**(e - 127), not for the number e."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    values = quant.from_ue8m0(bytes_)

    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert values[255].isnan()
    assert torch.equal(quant.to_ue8m0(values[1:254]).view(torch.uint8), bytes_[1:254])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_are_the_next_power_of_two(dtype):
    """Powers of two stay, anything above goes to the next one."""
    exact = torch.tensor([2.0**e for e in range(-126, 127)], dtype=dtype)
    above = torch.nextafter(exact, torch.full_like(exact, math.inf))

    assert torch.equal(quant.power_of_two_at_least(exact), exact)
    assert torch.equal(quant.power_of_two_at_least(above), 2 * exact)


def test_fp8_scale_keeps_the_largest_value_and_changes_at_448():
    """amax 448 has scale 1; the next float needs scale 2, so odd multiples of 1/8 are lost."""
    kept = torch.tensor([448.0, 1.125])
    moved = torch.tensor([448.00003, 1.125])

    assert quant.round_trip_fp8(kept, 2).tolist() == [448.0, 1.125]
    assert quant.round_trip_fp8(moved, 2).tolist() == [448.0, 1.125]
    assert quant.round_trip_fp8(torch.tensor([449.0, 2.0**-9]), 2).tolist() == [448.0, 0.0]
    assert quant.round_trip_fp8(torch.tensor([448.0, 2.0**-9]), 2).tolist() == [448.0, 2.0**-9]


def test_fp8_amax_floor():
    """Below amax 1e-4 the scale stops shrinking: 2**-22 is the power of two at 1e-4 / 448."""
    tiny = torch.full((4,), 2.0**-22 * 2.0**-9 * 0.4)

    assert quant.round_trip_fp8(tiny, 4).tolist() == [0.0] * 4
    assert quant.round_trip_fp8(tiny * 2, 4).tolist() == [2.0**-31] * 4
    assert quant.round_trip_fp8(torch.zeros(4), 4).tolist() == [0.0] * 4


def test_fp4_with_power_of_two_scale():
    """amax 6 has scale 1; amax 7 has scale 2, in which 7 saturates nothing and becomes 3 or 4 twos."""
    assert quant.round_trip_fp4(torch.tensor([6.0, 1.0, 0.25, -2.6]), 4).tolist() == [6, 1, 0, -3]
    assert quant.round_trip_fp4(torch.tensor([7.0, 1.0, 0.6, -3.0]), 4).tolist() == [8, 1, 1, -3]
    assert quant.round_trip_fp4(torch.zeros(32), 32).tolist() == [0.0] * 32
    smallest = torch.tensor([1e-37, 5e-38])
    assert torch.isfinite(quant.round_trip_fp4(smallest, 2)).all()


def test_fp4_with_e4m3_scale():
    """The scale is amax / 6 rounded to e4m3 (not to a power of two), at least 2**-9."""
    x = torch.tensor([6.6, 1.1, 0.55, -3.3])  # amax / 6 = 1.1 rounds to 1.125

    assert quant.round_trip_fp4_e4m3(x, 4).tolist() == pytest.approx([6.75, 1.125, 0.5625, -3.375])
    assert quant.round_trip_fp4_e4m3(torch.full((4,), 2.0**-12), 4).tolist() == [0.0] * 4
    assert quant.round_trip_fp4_e4m3(torch.full((4,), 2.0**-10), 4).tolist() == [2.0**-10] * 4
    assert quant.round_trip_fp4_e4m3(torch.zeros(4), 4).tolist() == [0.0] * 4


@given(
    st.sampled_from(
        [(quant.round_trip_fp8, 64), (quant.round_trip_fp4, 32), (quant.round_trip_fp4_e4m3, 16)]
    ),
    st.integers(1, 100),
    st.integers(0, 2**31),
    st.floats(-20, 20),
)
def test_a_round_trip_is_idempotent_and_local(how, width, seed, exponent):
    """What was stored once is stored exactly again, and a group does not see its neighbours."""
    trip, group = how
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = trip(x, group)

    assert once.shape == x.shape
    if trip is not quant.round_trip_fp4_e4m3:  # its scale is not of the values' own making
        assert torch.equal(trip(once, group), once)
    first = trip(x[:, :group].contiguous(), group)
    assert torch.equal(first, once[:, :group])


def test_block_fp8_uses_each_squares_own_scale():
    """Rows and columns beyond a square do not share its scale; short last squares work."""
    weight = torch.ones(40, 70)
    weight[:32, :32] *= 2.0**-12
    weight[32:, 64:] *= 2.0**12
    packed, scale = quant.quantise_fp8(weight, 32)

    assert packed.dtype == quant.E4M3
    assert scale.shape == (2, 3)
    assert torch.equal(quant.dequantise_fp8(packed, scale, 32), weight)
    assert scale.view(torch.uint8).tolist() == [
        [127 - 20, 127 - 8, 127 - 8],
        [127 - 8, 127 - 8, 127 + 4],
    ]


def test_packed_fp4_puts_the_even_column_in_the_low_nibble():
    """Bytes are read low nibble first and scaled by the group's power of two."""
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([6.0, -0.5, 3.0, 1.0])
    weight[0, 32:34] = torch.tensor([24.0, 4.0])
    packed, scale = quant.quantise_fp4(weight, 32)

    assert packed.dtype == torch.int8
    assert packed.view(torch.uint8)[0, :2].tolist() == [0x97, 0x25]
    assert scale.view(torch.uint8).tolist() == [[127, 129]]
    assert torch.equal(quant.dequantise_fp4(packed, scale, 32), weight)


def test_fp4_needs_whole_groups():
    """A matrix whose columns do not fill groups is refused."""
    with pytest.raises(ValueError, match="divisible by 32, got 40"):
        quant.quantise_fp4(torch.ones(2, 40), 32)


def test_table_rows_have_their_own_scales():
    """Engram rows are scaled per 32 columns of a row."""
    table = torch.tensor([[1.0] * 32 + [2.0**-12] * 32, [2.0**12] * 64])
    packed, scale = quant.quantise_rows_fp8(table, 32)

    assert scale.view(torch.uint8).tolist() == [[119, 107], [131, 131]]
    assert torch.equal(quant.dequantise_rows_fp8(packed, scale, 32), table)
