"""Products with packed weights: twins against the model's own maths, kernels against twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.kernels import gemm, gemv, linear, reference
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.fp4 import stored_codes, stored_scales
from engine.kernels.roundtrip import round_trip_fp8
from engine.model import quant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16]
#: Relative to the largest value: sums in another order; a result rounded to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
KINDS = ["fp8 128", "fp8 32", "fp4", "bfloat16", "float32"]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory nobody has written is NaN, so that a hole in a result shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=DEVICE, dtype=dtype)


def matrix(kind: str, n: int, k: int, seed: int = 1) -> Matrix:
    """A random weight whose rows, and so whose scales, differ in size."""
    values = normal(n, k, seed=seed).cpu() * torch.linspace(0.1, 30, n)[:, None]
    if kind in ("bfloat16", "float32"):
        return Matrix("plain", values.to(device=DEVICE, dtype=getattr(torch, kind)))
    if kind == "fp4":
        packed, scale = quant.quantise_fp4(values, 32)
        codes = stored_codes(packed.view(torch.uint8)).to(DEVICE)
        return Matrix("fp4", codes, stored_scales(scale.view(torch.uint8)).to(DEVICE), 32)
    block = int(kind.split()[1])
    packed, scale = quant.quantise_fp8(values, block)
    return Matrix("fp8", packed.to(DEVICE), scale.view(torch.uint8).to(DEVICE), block)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to b's largest value; infinite where a is not finite."""
    if a.shape != b.shape or not a.isfinite().all():
        return float("inf")
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


# ---------------------------------------------------------------- twins


def test_a_plain_product_is_the_references():
    """On plain float32 weights the twin differs from the eager model's linear."""
    x, w = normal(5, 48), matrix("float32", 24, 48)
    assert torch.equal(linear.linear_torch(x, w), reference.linear(x, w.data))


@pytest.mark.parametrize("kind", ["fp8 128", "fp8 32", "fp4"])
def test_a_packed_product_is_that_of_its_values(kind):
    """The twin's product is not that of the dequantised weight and the rounded input."""
    x, w = normal(3, 256), matrix(kind, 130, 256)
    exact = round_trip_fp8(x, 32).double() @ dequantise(w, torch.float64).t()
    assert difference(linear.linear_torch(x, w, act_group=32), exact) < 1e-6


def test_grouped_products_are_the_references():
    """The twin of wo_a differs from the eager model's grouped projection."""
    o, w = normal(5, 4 * 32), matrix("float32", 4 * 8, 32)
    expected = reference.grouped_output(o.view(5, 8, 16), w.data.view(4, 8, 32))
    assert difference(linear.grouped_linear_torch(o, w, 4), expected) < 1e-6


def test_a_normed_product_is_norm_round_product():
    """The twin does not norm, then round, then multiply with every weight."""
    x, norm = normal(5, 64), normal(64, seed=3)
    ws = [matrix("fp8 32", 40, 64), matrix("float32", 8, 64)]
    low = round_trip_fp8(reference.rms_norm(x, norm, 1e-6), 32)
    for got, w in zip(linear.norm_linear_torch(x, norm, 1e-6, ws, act_group=32), ws, strict=True):
        assert difference(got, low @ dequantise(w).t()) < 1e-6


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 128, 256), (4, 40, 128), (3, 130, 288), (17, 96, 64), (70, 40, 64), (129, 40, 160)],
)
def test_a_product_equals_its_twin(rows, n, k, kind, dtype):
    """A kernel's product differs from the twin's (even and odd shapes, few and many rows)."""
    x, w = normal(rows, k, dtype=dtype), matrix(kind, n, k)
    for out in {dtype, torch.float32}:
        got = linear.linear_triton(x, w, act_group=32, out_dtype=out)
        twin = linear.linear_torch(x, w, act_group=32, out_dtype=out)
        assert got.dtype == out
        assert difference(got, twin) < TOLERANCE[out]


def test_every_code_of_e4m3_is_multiplied_exactly():
    """A weight's e4m3 code is read as another value."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(2)[:256].view(1, 256).repeat(128, 1)
    scale = torch.tensor([[127, 120]], dtype=torch.uint8, device=DEVICE)
    w = Matrix("fp8", codes.to(DEVICE).view(torch.float8_e4m3fn), scale, 128)
    for first in range(0, 256, 64):  # each one-hot row reads one column of the weight
        x = torch.eye(256, device=DEVICE, dtype=torch.bfloat16)[first : first + 64]
        expected = dequantise(w)[0, first : first + 64]
        assert torch.equal(linear.linear_triton(x, w)[:, 5].float(), expected)


@pytest.mark.parametrize("kind", ["fp4", "fp8 32", "fp8 128"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unpacking_is_exact(kind, dtype):
    """Unpacked weights differ from their values."""
    w = matrix(kind, 37, 608)
    assert torch.equal(gemm.unpack(w, dtype), dequantise(w, dtype))


def test_products_of_one_launch_are_those_of_several():
    """A product changes by what shares its launch (five: more than one launch takes)."""
    x, other = normal(3, 256, dtype=torch.bfloat16), normal(3, 256, seed=7, dtype=torch.bfloat16)
    xs = [x, other, other, other, x]
    ws = [matrix(kind, n, 256, n) for kind, n in zip(KINDS, (256, 96, 8, 130, 24), strict=True)]
    ws[2] = matrix("bfloat16", 520, 256)
    kinds = [None, torch.float32, torch.float32, None, torch.float32]
    together = linear.linears_triton(xs, ws, out_dtypes=kinds)
    twins = linear.linears_torch(xs, ws, out_dtypes=kinds)
    for x, w, kind, got, twin in zip(xs, ws, kinds, together, twins, strict=True):
        assert torch.equal(got, linear.linear_triton(x, w, out_dtype=kind))
        assert difference(got, twin) < TOLERANCE[got.dtype]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [2, 130])
def test_a_normed_product_equals_its_twin(rows, dtype):
    """Norm, rounding or product of a slice of columns differ from the twin's."""
    wide, norm = normal(rows, 200, dtype=dtype), normal(160, seed=3)
    ws = [matrix("fp8 32", 40, 160), matrix("fp8 32", 136, 160, 2)]
    call = (wide[:, :160], norm, 1e-6, ws)
    got = linear.norm_linear_triton(*call, act_group=32)
    for each, twin in zip(got, linear.norm_linear_torch(*call, act_group=32), strict=True):
        # A statistic's last bit may move a value across a rounding step of 1/16.
        assert difference(each, twin) < 1e-2


def test_a_zero_row_is_normed_to_zero():
    """A row of zeros becomes NaN under V4.1's eps of 1e-20."""
    low = linear._prepared(torch.zeros(1, 64, device=DEVICE), normal(64), 1e-20, 32)
    assert torch.equal(low, torch.zeros_like(low))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 18, 130])
@pytest.mark.parametrize("group", [32, 128, None])
def test_the_attention_output_equals_its_twin(group, rows, dtype):
    """wo_a by groups, its rounding or wo_b's summands differ from the twin's."""
    o = normal(rows, 2 * 160, dtype=dtype)
    wo_a, wo_b = matrix("fp8 32", 2 * 128, 160), matrix("fp8 32", 72, 256, 2)
    wo_a.data.view(torch.uint8)[:] &= 0xBF  # rows of like size: none is lost in rounding
    got = linear.attention_output_triton(o, wo_a, wo_b, 2, act_group=group).double().sum(1)
    twin = linear.attention_output_torch(o, wo_a, wo_b, 2, act_group=group).double().sum(1)
    low = linear.grouped_linear_triton(o, wo_a, 2, out_act_group=group)
    assert difference(low, linear.grouped_linear_torch(o, wo_a, 2, out_act_group=group)) < 0.1
    # A value of wo_a's result beside a rounding boundary may fall to either side.
    assert difference(got, twin) < (1e-2 if group else TOLERANCE[dtype])


@settings(max_examples=15)
@given(
    split=st.integers(1, 5),
    rows=st.integers(1, 20),
    bn=st.sampled_from([32, 64, 128]),
    parts=st.booleans(),
    left=st.booleans(),
    kind=st.sampled_from(["fp8 32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_any_split_gives_the_same_product(split, rows, bn, parts, left, kind, seed):
    """Cutting K or N another way, or turning operands round, changes a product or leaves a count."""
    x, w = normal(rows, 160, seed=seed, dtype=torch.bfloat16), matrix(kind, 72, 160)
    shape = (rows, split, 72) if parts else (rows, 72)
    first, again = (torch.full(shape, float("nan"), device=DEVICE) for _ in range(2))
    for out in (first, again):
        job = gemv.Job(x, w, out)
        gemv.launch([job], [gemv.Config(16, bn, 32, split, 2, left)])
    assert torch.equal(first, again)
    got = first.sum(1) if parts else first
    twin = linear.linear_torch(x, w, out_dtype=torch.float32)
    assert difference(got, twin) < TOLERANCE[torch.float32]
    assert not gemv._counters(x.device).any()


def shifted(codes: Tensor) -> Tensor:
    """Rows of FP8 codes moved up by one."""
    return codes.view(torch.uint8).roll(1, 0).view(codes.dtype)


FAULTS = {
    "scales transposed": lambda x, w: (x, Matrix("fp8", w.data, w.scale.t().contiguous(), w.block)),
    "a scale off by one": lambda x, w: (x, Matrix("fp8", w.data, w.scale + 1, w.block)),
    "input not rounded": lambda x, w: (x * 1.01, w),
    "a row of the weight missing": lambda x, w: (
        x,
        Matrix("fp8", shifted(w.data), w.scale, w.block),
    ),
    "the last columns left out": lambda x, w: (
        torch.cat((x[:, :-32], torch.zeros_like(x[:, -32:])), 1),
        w,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_planted_fault(fault):
    """The tolerance hides a mistake in the kernel's input."""
    x, w = normal(3, 128, dtype=torch.bfloat16), matrix("fp8 32", 128, 128)
    wrong = linear.linear_triton(*FAULTS[fault](x, w))
    assert difference(wrong, linear.linear_torch(x, w)) > TOLERANCE[torch.bfloat16]


SHAPES_OF_MODELS = [
    ("fp8", 128, 1536, 4096, 1, 0),
    ("fp8", 128, 32768, 1024, 1, 0),
    ("fp8", 128, 8192, 4096, 8, 128),
    ("fp8", 32, 8192, 4096, 8, 32),
    ("fp8", 32, 5120, 8192, 1, 0),
    ("plain", 0, 129280, 4096, 1, 0),
    ("plain", 0, 64, 5120, 1, 0),
]


@pytest.mark.parametrize(("kind", "block", "n", "k", "groups", "out_group"), SHAPES_OF_MODELS)
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64, 128])
def test_tilings_fit_the_models(rows, kind, block, n, k, groups, out_group):
    """A tiling leaves a share of K empty, cuts a group in two or mixes scales in one sum."""
    element = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    with torch.device("meta"):
        w = Matrix(kind, torch.empty(n, k, dtype=element), None, block)
        x = torch.empty(rows, groups * k, dtype=torch.bfloat16)
    config = gemv.choose(gemv.Job(x, w, x, groups, out_group))
    steps = -(-k // config.bk)
    assert 1 <= config.split <= steps
    assert (config.split - 1) * -(-steps // config.split) < steps
    assert (n // groups) % config.bn == 0 or groups == 1
    assert not out_group or config.bn % out_group == 0
    assert not block or config.bk % block == 0 or block % config.bk == 0


# ---------------------------------------------------------------- real shapes


def random_codes(n: int, k: int, block: int) -> Matrix:
    """A random FP8 weight made where it lies; its rows are of like size."""
    generator = torch.Generator(DEVICE).manual_seed(n)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=DEVICE, generator=generator)
    shape = -(-n // block), -(-k // block)
    scale = torch.randint(118, 122, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
    return Matrix("fp8", (codes & 0xBF).view(torch.float8_e4m3fn), scale, block)


REAL = {"wq_a_wkv": (1536, 4096, 128), "v41 wo_b": (5120, 8192, 32), "odd": (1000, 1056, 32)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("rows", [1, 33, 64, 300])
def test_real_shapes_equal_their_twins(name, rows):
    """A product of a real shape differs from the float32 twin's by more than bfloat16's rounding."""
    n, k, block = REAL[name]
    x, w = normal(rows, k, dtype=torch.bfloat16), random_codes(n, k, block)
    exact = linear.linear_torch(x.float(), w)
    assert difference(linear.linear_triton(x, w), exact) < 5e-3
    assert difference(linear.linear_parts_triton(x, w).float().sum(1), exact) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "block"), [(1, 128), (64, 128), (16, 32), (300, 128)])
def test_real_attention_output_equals_its_twin(block, rows):
    """wo_a and wo_b at real widths differ from the twin's."""
    o = normal(rows, 32768, dtype=torch.bfloat16)
    wo_a, wo_b = random_codes(8192, 4096, block), random_codes(4096, 8192, block)
    got = linear.attention_output_triton(o, wo_a, wo_b, 8, act_group=block).float().sum(1)
    twin = linear.attention_output_torch(o, wo_a, wo_b, 8, act_group=block).float().sum(1)
    assert difference(got, twin) < 1e-2


@pytest.mark.gpu
def test_replays_of_a_graph_are_bitwise_equal():
    """Split products differ between replays, or between replay and eager."""
    x, w = normal(4, 4096, dtype=torch.bfloat16), random_codes(1536, 4096, 128)
    eager = linear.linear_triton(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = linear.linear_triton(x, w)
    for _ in range(200):
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed, eager)
