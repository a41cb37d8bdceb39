"""Records: packed and unpacked they are the round trip, on the device as in torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from engine.kernels import records, roundtrip as rt
from engine.kernels.record_device import record_tile_device, store_record_device
from engine.kernels.triton_compat import tl, triton
from engine.plan.records import ALIGNMENT, GROUPS, record_of
from tests.engine.kernels.test_roundtrip import DEVICE, awkward

#: Form, width, rotary tail: the models' widths, and the narrow ones of small models.
SHAPES = [
    ("none", 64, 8),
    ("fp8_64_tail", 512, 64),
    ("fp8_64_tail", 128, 32),
    ("fp8_64_tail", 32, 8),
    ("fp8_32", 512, 64),
    ("fp8_32", 16, 8),
    ("fp4_e4m3_16", 512, 64),
    ("fp4_e4m3_16", 32, 8),
    ("fp4_32", 128, 0),
    ("fp4_32", 16, 0),
    ("hadamard_fp4_32", 128, 0),
]
DTYPES = [torch.float32, torch.bfloat16]


@triton.jit
def store(x, pool, signs, M: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr):
    """Rows [M, D] but the last, in reverse order, behind one record that is nobody's."""
    row = tl.arange(0, M)
    tile = tl.load(x + row[:, None] * D + tl.arange(0, D)[None, :])
    matrix = rt.signs_device(signs, FORM, D)
    place = (M - row).to(tl.int64)
    store_record_device(pool, place, tile, row < M - 1, D, TAIL, FORM, matrix)


@triton.jit
def load(
    pool, y, M: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Rows [M, D], in reverse order."""
    row = tl.arange(0, M)
    place = (M - 1 - row).to(tl.int64) * UNITS
    tile = record_tile_device(pool, place, D, TAIL, FORM, y.dtype.element_ty)
    tl.store(y + row[:, None] * D + tl.arange(0, D)[None, :], tile)


def on_device(rows: Tensor, form: str, width: int, tail: int, dtype: torch.dtype) -> Tensor:
    """Values of 16 rows as a kernel reads them."""
    y = torch.full((16, width), float("nan"), dtype=dtype, device=DEVICE)
    units = width // 8 if form == "none" else rows.shape[1] // ALIGNMENT
    load[(1,)](rows.flip(0).contiguous(), y, 16, width, tail, form, units)
    return y


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, also in which zeros are negative."""
    bits = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(bits), b.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "width", "tail"), SHAPES)
def test_a_record_is_the_round_trip(form, width, tail, dtype):
    """What comes back differs from the round trip, in torch or in a kernel."""
    x = awkward(width, dtype)
    packed = records.pack_torch(x, form, tail)
    record = record_of(form, width, tail, x.itemsize)
    assert packed.shape == (16, width if record is None else record.nbytes)
    want = rt.round_trip(x, form, tail)
    assert same_bits(records.unpack_torch(packed, form, width, tail, dtype), want)
    assert same_bits(on_device(packed, form, width, tail, dtype), want)
    again = records.pack_torch(want, form if form != "hadamard_fp4_32" else "fp4_32", tail)
    assert same_bits(records.unpack_torch(again, form, width, tail, dtype), want)


@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32),
    form=st.sampled_from(["fp8_64_tail", "fp8_32", "fp4_e4m3_16", "fp4_32"]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_row_comes_back_as_the_round_trip_has_it(numbers, form, dtype):
    """Some row is stored as other values than the round trip's."""
    x = torch.tensor([numbers], dtype=dtype)
    packed = records.pack_torch(x, form, 8)
    assert same_bits(records.unpack_torch(packed, form, 32, 8, dtype), rt.round_trip(x, form, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "width", "tail"), SHAPES)
def test_kernels_store_what_torch_packs(form, width, tail, dtype):
    """A kernel stores other bytes than torch, or beside the rows it was given."""
    x = awkward(width, dtype)
    if form == "hadamard_fp4_32":  # one number a row: longer sums depend on their order
        x = x * torch.eye(width, dtype=dtype, device=DEVICE)[3:19]
    packed = records.pack_torch(x, form, tail)
    filler = float("nan") if form == "none" else 0xFF
    pool = torch.full((18, packed.shape[1]), filler, dtype=packed.dtype, device=DEVICE)
    signs = rt.signs_for(form, width, dtype, x.device)
    store[(1,)](x, pool, signs, 16, width, tail, form)
    found = pool[2:17].flip(0)
    record = record_of(form, width, tail, x.itemsize)
    used = width if record is None else record.scales_at + record.num_scales
    assert torch.equal(found[:, :used], packed[:15, :used])
    for untouched in (pool[:2], pool[17:], found[:, used:]):
        assert (untouched.isnan() if record is None else untouched == 0xFF).all()


@pytest.mark.parametrize(("form", "width", "tail"), SHAPES)
def test_poison_is_nan_and_zeros_are_zero(form, width, tail):
    """Memory full of 0xff reads as a number somewhere, or fresh memory as something else than 0."""
    if form == "none":
        return
    size = record_of(form, width, tail, 2).nbytes
    for byte in (0xFF, 0):
        rows = torch.full((16, size), byte, dtype=torch.uint8, device=DEVICE)
        twin = records.unpack_torch(rows, form, width, tail, torch.bfloat16)
        for values in (twin, on_device(rows, form, width, tail, torch.bfloat16)):
            assert (values.isnan() if byte else values == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "width", "tail"), SHAPES)
def test_nan_makes_its_group_nan(form, width, tail, dtype):
    """A NaN is stored as a number, or takes another group with it."""
    if form in ("none", "hadamard_fp4_32"):  # the transform spreads it over the row
        return
    x = awkward(width, dtype)
    x[0, 3] = float("nan")
    pool = records.rows_like(x, form, width, tail, 18)
    store[(1,)](x, pool, None, 16, width, tail, form)
    group = min(GROUPS[form], width)
    for packed in (records.pack_torch(x, form, tail)[0], pool[16]):
        values = records.unpack_torch(packed, form, width, tail, dtype)
        codes = values[: width - tail] if form == "fp8_64_tail" else values
        assert codes[:group].isnan().all()
        assert not codes[group:].isnan().any()
        assert not values[len(codes) :].isnan().any()
    packed = records.pack_torch(x, form, tail)
    got, want = (
        on_device(packed, form, width, tail, dtype),
        records.unpack_torch(packed, form, width, tail, dtype),
    )
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize(
    ("form", "width", "nbytes"),
    [
        ("fp8_64_tail", 512, 592),
        ("fp8_32", 512, 528),
        ("fp4_e4m3_16", 512, 288),
        ("fp4_32", 128, 80),
    ],
)
def test_sizes_at_the_models_widths(form, width, nbytes):
    """Records of the models are longer than their table says."""
    assert record_of(form, width, 64, 2).nbytes == nbytes


@pytest.mark.parametrize(
    "fault",
    [
        lambda rows: rows.roll(1, 1),
        lambda rows: torch.cat((rows[:, :448], rows[:, 512:], rows[:, 448:512]), 1),
        lambda rows: torch.cat((rows[:, :576], rows[:, 576:583].flip(1), rows[:, 583:]), 1),
    ],
    ids=["shifted", "tail elsewhere", "scales in another order"],
)
def test_planted_faults_show(fault):
    """The comparison with the round trip would not see a record that is laid out otherwise."""
    x = awkward(512, torch.bfloat16)
    packed = fault(records.pack_torch(x, "fp8_64_tail", 64)).contiguous()
    want = rt.round_trip(x, "fp8_64_tail", 64)
    assert not torch.equal(
        records.unpack_torch(packed, "fp8_64_tail", 512, 64, torch.bfloat16), want
    )
    assert not torch.equal(on_device(packed, "fp8_64_tail", 512, 64, torch.bfloat16), want)


def test_what_does_not_fit_is_refused():
    """A width or a pool of another form is taken for one that fits."""
    with pytest.raises(ValueError, match="width: expected a power of two from 32 on"):
        record_of("fp4_e4m3_16", 16, 0, 2)
    with pytest.raises(ValueError, match="width: expected a power of two from 16 on"):
        record_of("fp8_32", 48, 0, 2)
    with pytest.raises(ValueError, match="tail: expected a power of two from 4 up to 32, got 64"):
        record_of("fp8_64_tail", 64, 64, 2)
    plain = torch.zeros(1, 64)
    with pytest.raises(
        ValueError, match=r"expected torch.uint8 rows of 80 for fp8_32, got torch.f"
    ):
        records.layout_of(plain, "fp8_32", 64, 8, torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected floating rows of 64 for none, got torch.uint8"):
        records.layout_of(plain.byte(), "none", 64, 8, torch.bfloat16)
