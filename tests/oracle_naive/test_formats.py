"""The naive number formats against values worked out by hand and against torch's own casts."""

import numpy as np
import pytest
import torch

from tests.oracle_naive.formats import (
    E2M1,
    E2M1_MAGNITUDES,
    E4M3,
    E4M3_MAGNITUDES,
    RoundTrips,
    hadamard,
    power_of_two_at_least,
    to_nearest,
    ue8m0,
    unpack_e2m1,
)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-9),  # least subnormal
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),  # least normal
        (0x38, 1.0),
        (0x39, 1.125),
        (0x7E, 448.0),
        (0xB8, -1.0),
        (0xFE, -448.0),
    ],
)
def test_e4m3_code_has_the_value_of_its_bits(code: int, value: float) -> None:
    """sign, four exponent bits with bias 7, three mantissa bits."""
    assert E4M3[code] == value


def test_e4m3_table_equals_torch() -> None:
    """All 256 codes, the two NaNs included."""
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(E4M3, theirs)


def test_e4m3_rounding_equals_torch_up_to_the_largest_value() -> None:
    """Nearest, ties to even, subnormals included."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4000) * np.exp2(rng.integers(-12, 8, 4000))
    halves = (E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2
    x = np.concatenate([values, halves, -halves])
    x = np.clip(x, -448, 448)
    theirs = torch.from_numpy(x).float().to(torch.float8_e4m3fn).double().numpy()
    ours = to_nearest(x.astype(np.float32).astype(np.float64), E4M3_MAGNITUDES)
    np.testing.assert_array_equal(ours, theirs)


def test_beyond_the_largest_value_saturates() -> None:
    """No infinity and no NaN."""
    assert to_nearest(np.array([460.0, -1e9]), E4M3_MAGNITUDES).tolist() == [448.0, -448.0]
    assert to_nearest(np.array([6.4, -7.0]), E2M1_MAGNITUDES).tolist() == [6.0, -6.0]


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (0.25, 0.0),
        (0.26, 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (2.51, 3.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (-5.0, -4.0),
    ],
)
def test_e2m1_halves_go_to_the_even_code(x: float, rounded: float) -> None:
    """Codes 0 to 7 are 0, .5, 1, 1.5, 2, 3, 4, 6; even codes win ties."""
    assert to_nearest(np.array(x), E2M1_MAGNITUDES) == rounded


def test_packed_e2m1_has_the_even_input_in_the_low_nibble() -> None:
    """0x_A_5 is 3 (code 5) then -1 (code 10)."""
    assert unpack_e2m1(np.array([[0xA5, 0x70]], dtype=np.uint8)).tolist() == [[3.0, -1.0, 0.0, 6.0]]
    assert E2M1[8] == 0.0


def test_ue8m0_byte_is_a_power_of_two() -> None:
    """127 is one."""
    assert ue8m0(np.array([127, 128, 120], dtype=np.uint8)).tolist() == [1.0, 2.0, 2.0**-7]


@pytest.mark.parametrize(("x", "power"), [(1.0, 1.0), (1.0001, 2.0), (0.3, 0.5), (0.25, 0.25)])
def test_power_of_two_at_least(x: float, power: float) -> None:
    """An exact power stays."""
    assert power_of_two_at_least(np.array(x)) == power


def test_fp8_round_trip_by_hand() -> None:
    """amax 3.5 = 448/128: scale exactly 1/128; 0.1 is 12.8 steps of it and becomes 13/128."""
    x = np.array([3.5, 0.1, -0.1, 0.0, 7.0, 1.0, 0.0, 0.0])
    got = RoundTrips(True).fp8(x, 4)
    # second group: amax 7 -> scale 1/64, 1.0 is 64 steps
    np.testing.assert_array_equal(got, [3.5, 13 / 128, -13 / 128, 0, 7, 1, 0, 0])


def test_fp8_scale_floor() -> None:
    """All values tiny: amax counts as 1e-4, so the scale is 2^-22 and 1e-9 vanishes."""
    assert 2.0**-22 >= 1e-4 / 448 > 2.0**-23
    got = RoundTrips(True).fp8(np.array([2.0**-22, 1e-10]), 2)
    np.testing.assert_array_equal(got, [2.0**-22, 0.0])


def test_fp4_round_trip_by_hand() -> None:
    """amax 5 -> scale 1 (5/6 up to a power of two); 5 is a tie and goes to 4."""
    got = RoundTrips(True).fp4(np.array([5.0, 0.3, 2.6, -1.2]), 4)
    np.testing.assert_array_equal(got, [4.0, 0.5, 3.0, -1.0])


def test_fp4_with_e4m3_scale_by_hand() -> None:
    """amax 6.3 -> 1.05, whose nearest e4m3 is 1.0: the largest saturates at 6."""
    x = np.zeros(32)
    x[:3] = [6.3, -2.4, 0.2]
    x[16:18] = [0.001, 1e-5]  # amax below the floor 6 * 2^-9: scale 2^-9, 0.001 is 0.512 steps
    expected = np.zeros(32)
    expected[:3] = [6.0, -2.0, 0.0]
    expected[16] = 0.5 * 2.0**-9
    np.testing.assert_array_equal(RoundTrips(True).fp4_e4m3(x), expected)


def test_round_trips_off_change_nothing() -> None:
    """The very same array comes back."""
    off = RoundTrips(False)
    x = np.array([0.1, 0.2])
    assert off.fp8(x, 2) is x
    assert off.fp4(x, 2) is x
    assert off.fp4_e4m3(x) is x


def test_hadamard_is_orthonormal_in_sylvesters_order() -> None:
    """Entry (i, j) has the sign of the parity of i & j."""
    h = hadamard(16)
    np.testing.assert_allclose(h @ h.T, np.eye(16), atol=1e-15)
    sign = [[(-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    np.testing.assert_array_equal(h, sign)
    with pytest.raises(ValueError, match="power of two, got 12"):
        hadamard(12)
