"""Products of FP8 codes: rounding against round_trip_fp8, kernels against exact sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import codes, linear
from engine.kernels.codes import Codes, Cut
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.roundtrip import round_trip_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
#: Of the largest value: what the tensor cores cut off; sums in float32 where they are emulated.
TOLERANCE = 2.0**-10 if torch.cuda.is_available() else 1e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in bfloat16, columns of very different sizes."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-4, 3, shape[-1])).to(DEVICE, BF16)


def fp8(n: int, k: int, block: int, seed: int = 1) -> Matrix:
    """Random codes without NaN, scales of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=draw) & 0xBF
    shape = -(-n // block), -(-k // block)
    scale = torch.randint(100, 130, shape, dtype=torch.uint8, generator=draw)
    return Matrix("fp8", data.view(torch.float8_e4m3fn).to(DEVICE), scale.to(DEVICE), block)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN everywhere."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def difference(got: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest value; infinite where not finite."""
    if got.shape != exact.shape or not got.isfinite().all():
        return float("inf")
    return float((got.double() - exact).abs().max() / exact.abs().max())


def exact(x: Codes, w: Matrix) -> Tensor:
    """The product in float64."""
    return x.decoded(torch.float64) @ dequantise(w, torch.float64).t()


@pytest.mark.parametrize("group", [32, 128])
def test_codes_hold_what_rounding_gives(group):
    """Decoded codes differ from round_trip_fp8, or the kernel's codes from the twin's."""
    x, norm = normal(5, 512), torch.rand(512, device=DEVICE) + 0.5
    expected = round_trip_fp8(x, group)
    assert torch.equal(codes.encode_torch(x, group).decoded(BF16), expected)
    assert torch.equal(linear._encoded(x, None, 0.0, group).decoded(BF16), expected)
    twin = linear._prepared(x, norm, 1e-6, group)
    assert torch.equal(linear._encoded(x, norm, 1e-6, group).decoded(BF16), twin)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(
    ("rows", "cut"), [(1, Cut(64, 1, 2, 4)), (4, Cut(128, 1, 2, 4)), (17, Cut(128, 1, 2, 4))]
)
def test_a_product_of_two_weights_equals_exact_sums(rows, cut, block):
    """A product with either of two weights differs from exact sums, or leaves a hole."""
    x = codes.encode_torch(normal(rows, 384), block)
    ws = fp8(256, 384, block), fp8(128, 384, block, seed=2)
    outs = [poisoned(rows, len(w.data)) for w in ws]
    codes.launch(x, ws, outs, cut)
    for w, out in zip(ws, outs, strict=True):
        assert difference(out, exact(x, w)) < TOLERANCE


@pytest.mark.parametrize("split", [2, 3])
def test_summands_add_up_to_the_product(split):
    """Shares of the columns, of which the last is shorter, do not add up to the product."""
    x, w = codes.encode_torch(normal(3, 640), 128), fp8(128, 640, 128)
    out = poisoned(3, split, 128)
    codes.launch(x, (w,), (out,), Cut(64, split, 2, 4))
    assert difference(out.sum(1), exact(x, w)) < TOLERANCE


def test_powers_of_another_group_are_noticed():
    """Powers shifted by one group pass the comparison above."""
    x, w = codes.encode_torch(normal(2, 256), 128), fp8(128, 256, 128)
    out = poisoned(2, 128)
    codes.launch(replace(x, powers=x.powers.roll(1, 0)), (w,), (out,), Cut(64, 1, 2, 4))
    assert difference(out, exact(x, w)) > 100 * TOLERANCE


@pytest.mark.parametrize("block", [32, 128])
def test_layers_products_equal_their_twins(block):
    """Norm and queries, or the attention's two products, through codes differ from the twins."""
    x, norm = normal(3, 512)[:, :256], torch.rand(256, device=DEVICE) + 0.5
    ws = fp8(256, 256, block), fp8(128, 256, block, seed=2)
    assert codes.take(x, ws, block)
    got = linear.norm_linear_triton(x, norm, 1e-6, ws, act_group=block)
    twin = linear.norm_linear_torch(x, norm, 1e-6, ws, act_group=block)
    for a, b in zip(got, twin, strict=True):
        assert difference(a, b.double()) < 5e-3
    o, wo_a, wo_b = normal(3, 512), fp8(256, 256, block, seed=3), fp8(128, 256, block, seed=4)
    a = linear.attention_output_triton(o, wo_a, wo_b, 2, act_group=block).sum(1)
    b = linear.attention_output_torch(o, wo_a, wo_b, 2, act_group=block).sum(1)
    # A sum beside a boundary of FP8 may fall to either side: one step of a few inputs.
    assert difference(a, b.double()) < 2e-2


@pytest.mark.parametrize("least", [6, 7])
def test_a_product_nobody_wants_is_zeros(least):
    """The second product is read where no position asks for it, or left out where one does."""
    x = codes.encode_torch(normal(3, 256), 128)
    ws = fp8(128, 256, 128), fp8(256, 256, 128, seed=2)
    positions = torch.tensor([1, 6, 0], dtype=torch.int32, device=DEVICE)
    first, second = codes.run(x, ws, BF16, (positions, least))
    whole = codes.run(x, ws, BF16)
    assert torch.equal(first, whole[0])
    assert torch.equal(second, whole[1] if least == 6 else torch.zeros_like(second))


@pytest.mark.parametrize(
    ("rows", "n", "k", "block", "kind"),
    [(65, 128, 128, 128, BF16), (1, 96, 128, 32, BF16), (1, 128, 160, 32, BF16),
     (1, 128, 128, 32, BF16), (1, 128, 128, 128, torch.float32)],
)  # fmt: skip
def test_other_products_are_left_to_other_kernels(rows, n, k, block, kind):
    """Codes are taken for more rows, odd shapes, blocks unlike the groups, or float32 rows."""
    assert not codes.take(torch.zeros(rows, k, dtype=kind), (fp8(n, k, block),), 128)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("block", [32, 128])
def test_real_widths_equal_exact_sums(rows, block):
    """At V4-Flash's widths a product differs from exact sums by more than bfloat16 would."""
    width = 1024 if block == 128 else 1280
    x = codes.encode_torch(torch.randn(rows, width, device=DEVICE).to(BF16), block)
    ws = fp8(32768, width, block), fp8(8192, width, block, seed=2)
    for w, got in zip(ws, codes.run(x, ws, torch.float32), strict=True):
        assert difference(got, exact(x, w)) < TOLERANCE
    x = codes.encode_torch(torch.randn(rows, 8192, device=DEVICE).to(BF16), block)
    w = fp8(4096, 8192, block)
    assert difference(codes.run_parts(x, w).sum(1), exact(x, w)) < TOLERANCE
