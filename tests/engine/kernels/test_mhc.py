"""Residual streams: twins against the model's own maths, kernels against twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.kernels import mhc, mhc_launch, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16]
STREAMS, LOGITS = 4, 24
MIXING = {"eps": 1e-6, "hc_eps": 1e-6, "iterations": 20}
FIELDS = ("x", "xq", "pre", "post", "comb")
#: Rows and widths: one row, some (a row a program), more (tiles of rows); widths of no tile.
SHAPES = [(1, 96), (3, 200), (19, 160)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory nobody has written is NaN, so that a hole in a result shows."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, make=make, **k: make(*a, **k).fill_(float("nan"))
        )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=DEVICE, dtype=dtype)


def site(rows: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of one turn; logits are large enough that gates and Sinkhorn matter."""
    return {
        "streams": normal(rows, STREAMS, width, dtype=dtype),
        "parts": normal(rows, 3, width, seed=1),
        "post": 2 * normal(rows, STREAMS, seed=2).sigmoid(),
        "comb": normal(rows, STREAMS, STREAMS, seed=3).softmax(-1),
        "fn": normal(LOGITS, STREAMS * width, seed=4) * 3 * (STREAMS * width) ** -0.5,
        "base": normal(LOGITS, seed=5),
        "norm": normal(width, seed=6),
    }


def weights(s: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a site to open."""
    return s["fn"], s["base"], s["norm"]


def closing(s: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of a site to close."""
    return s["streams"], s["parts"], s["post"], s["comb"]


def agree(got: mhc.HcIn, twin: mhc.HcIn, dtype: torch.dtype) -> None:
    """Fail where two opened sites differ by more than sums in another order explain."""
    for name in FIELDS:
        a, b = getattr(got, name), getattr(twin, name)
        if dtype == torch.bfloat16 and name in ("x", "xq"):
            # A value beside a boundary may fall to either side: the weighted sum, and once more
            # its norm, by a step of bfloat16; what is rounded to FP8 by a step of that.
            step = 2.0**-6 if name == "x" else 2.0**-3
            torch.testing.assert_close(
                a, b, atol=1e-3, rtol=step, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert (a != b).float().mean() < 0.02, name
            if name == "x":  # hardly ever both
                far = (a.float() - b.float()).abs() > 2.0**-7 * b.float().abs() + 1e-3
                assert far.float().mean() < 1e-4
        elif name == "xq":
            torch.testing.assert_close(a, b, atol=1e-5, rtol=2.0**-3)
            assert ((a - b).abs() > 1e-5).float().mean() < 0.01
        else:
            torch.testing.assert_close(
                a, b, atol=5e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


# ---------------------------------------------------------------- twins


def test_opening_is_the_models_own():
    """The twin's input or coefficients differ from the eager model's in float64."""
    s = {name: value.double() for name, value in site(6, 40, torch.float32).items()}
    tables = reference.SinkhornTables.make(STREAMS, 1e-6, torch.float64, torch.device(DEVICE))
    mixes = reference.stream_mixes(s["streams"], s["fn"], s["base"], 1e-6)
    pre, post, comb = reference.hc_coefficients(mixes, STREAMS, 20, tables)
    carried = normal(6, STREAMS, seed=9).double()
    for own in (None, carried):
        u = reference.collapse(s["streams"], pre if own is None else own)
        x = reference.rms_norm(u, s["norm"], 1e-6)
        got = mhc.hc_in_torch(s["streams"], *weights(s), own, act_group=None, **MIXING)
        for a, b in zip((got.x, got.pre, got.post, got.comb), (x, pre, post, comb), strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
        assert got.xq is got.x


def test_closing_is_the_models_own():
    """The twin's new streams differ from the eager model's; summands are not added up."""
    s = {name: value.double() for name, value in site(6, 40, torch.float32).items()}
    expected = reference.expand(s["streams"], s["parts"].sum(1), s["post"], s["comb"])
    torch.testing.assert_close(mhc.hc_out_torch(*closing(s)), expected, atol=1e-12, rtol=1e-12)


def test_the_head_is_the_models_own():
    """The twin's collapse after the last layer differs from the eager model's."""
    s = {name: value.double() for name, value in site(6, 40, torch.float32).items()}
    fn, base = s["fn"][:STREAMS], s["base"][:STREAMS]
    pre = reference.stream_mixes(s["streams"], fn, base, 1e-6).sigmoid() + 1e-6
    expected = reference.rms_norm(reference.collapse(s["streams"], pre), s["norm"], 1e-6)
    kinds = {"eps": 1e-6, "hc_eps": 1e-6}
    own = mhc.hc_head_torch(s["streams"], fn, base, s["norm"], None, **kinds)
    carried = mhc.hc_head_torch(s["streams"], None, None, s["norm"], pre, **kinds)
    for got in (own, carried):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("head", [mhc.hc_head_torch, mhc.hc_head_triton])
def test_a_head_of_both_models_is_refused(head):
    """A head with weights of its own and carried ones, or neither, is not refused."""
    s = site(1, 16, torch.float32)
    own = s["fn"][:STREAMS], s["base"][:STREAMS]
    for (fn, base), carried in [(own, s["post"]), ((None, None), None), ((own[0], None), None)]:
        with pytest.raises(ValueError, match="expected fn and base"):
            head(s["streams"], fn, base, s["norm"], carried, eps=1e-6, hc_eps=1e-6)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("delayed", [False, True])
def test_a_turn_equals_its_twin(rows, width, delayed, dtype):
    """New streams, input or coefficients of a turn differ from the twin's."""
    s = site(rows, width, dtype)
    carried = normal(rows, STREAMS, seed=9).sigmoid() if delayed else None
    call = (*closing(s), *weights(s), carried)
    mixed, got = mhc.hc_turn_triton(*call, act_group=32, **MIXING)
    other, _ = mhc.hc_turn_torch(*call, act_group=32, **MIXING)
    step = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(mixed, other, atol=1e-5, rtol=step)
    # From the same streams: a step of bfloat16 in one of them is no fault of what comes after.
    twin = mhc.hc_in_torch(mixed, *weights(s), carried, act_group=32, **MIXING)
    agree(got, twin, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_opening_and_closing_alone_equal_their_twins(rows, width, dtype):
    """A site opened without closing one, or closed without opening one, differs."""
    s = site(rows, width, dtype)
    got = mhc.hc_in_triton(s["streams"], *weights(s), None, act_group=None, **MIXING)
    agree(got, mhc.hc_in_torch(s["streams"], *weights(s), None, act_group=None, **MIXING), dtype)
    assert got.xq is got.x
    step = 1e-5 if dtype == torch.float32 else 2.0**-7
    closed = mhc.hc_out_triton(*closing(s)), mhc.hc_out_torch(*closing(s))
    torch.testing.assert_close(*closed, atol=1e-5, rtol=step)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_heads_equal_their_twins(rows, width, dtype):
    """The collapse after the last layer differs from the twin's, V4's or V4.1's."""
    s = site(rows, width, dtype)
    kinds = {"eps": 1e-6, "hc_eps": 1e-6}
    own = (s["fn"][:STREAMS], s["base"][:STREAMS], s["norm"], None)
    carried = (None, None, s["norm"], s["post"])
    step = 1e-5 if dtype == torch.float32 else 2.0**-7
    for call in (own, carried):
        for site_to_close in (None, closing(s)[1:]):
            options = kinds | {"closing": site_to_close}
            got = mhc.hc_head_triton(s["streams"], *call, **options)
            twin = mhc.hc_head_torch(s["streams"], *call, **options)
            # A step of bfloat16 in a stream may be one in the result.
            torch.testing.assert_close(
                got, twin, atol=2 * step if site_to_close else 1e-5, rtol=step
            )


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_rows_equal_their_twins(dtype, monkeypatch):
    """What a prompt's rows take, a product of split weights and weights made first, differs."""
    monkeypatch.setattr(mhc_launch, "MANY", 8)
    s = site(19, 160, dtype)
    mixed, got = mhc.hc_turn_triton(*closing(s), *weights(s), None, act_group=32, **MIXING)
    agree(got, mhc.hc_in_torch(mixed, *weights(s), None, act_group=32, **MIXING), dtype)
    kinds = {"eps": 1e-6, "hc_eps": 1e-6}
    head = s["streams"], s["fn"][:STREAMS], s["base"][:STREAMS], s["norm"], None
    step = 1e-5 if dtype == torch.float32 else 2.0**-7
    both = mhc.hc_head_triton(*head, **kinds), mhc.hc_head_torch(*head, **kinds)
    torch.testing.assert_close(*both, atol=1e-5, rtol=step)


def test_equal_and_zero_streams_stay_finite():
    """Rows of zeros, or of equal streams as after the embedding, give NaN under V4.1's eps."""
    s = site(3, 96, torch.bfloat16)
    streams = s["streams"][:, :1].repeat(1, STREAMS, 1)
    streams[1] = 0
    kinds = MIXING | {"eps": 1e-20}
    first = torch.eye(STREAMS, device=DEVICE)[:1].expand(3, -1).contiguous()
    got = mhc.hc_in_triton(streams, *weights(s), first, act_group=32, **kinds)
    twin = mhc.hc_in_torch(streams, *weights(s), first, act_group=32, **kinds)
    agree(got, twin, torch.bfloat16)
    assert not got.x[1].any()


def test_large_logits_are_balanced_as_in_the_twin():
    """Sinkhorn overflows, or stops an iteration early, on logits of a hundred."""
    s = site(5, 96, torch.float32)
    s["base"] = s["base"] * 100
    got = mhc.hc_in_triton(s["streams"], *weights(s), None, act_group=None, **MIXING)
    twin = mhc.hc_in_torch(s["streams"], *weights(s), None, act_group=None, **MIXING)
    agree(got, twin, torch.float32)
    fewer = MIXING | {"iterations": 19}
    early = mhc.hc_in_torch(s["streams"], *weights(s), None, act_group=None, **fewer)
    with pytest.raises(AssertionError):
        agree(early, twin, torch.float32)


@settings(max_examples=8)
@given(
    rows=st.integers(1, 18),
    bt=st.sampled_from([1, 16, 32]),
    bd=st.sampled_from([16, 64, 256]),
    seed=st.integers(0, 99),
)
def test_any_tiling_gives_the_same_turn(rows, bt, bd, seed):
    """Cutting rows or d another way changes streams or logits."""
    s = site(rows, 160, torch.bfloat16)
    s["streams"] = normal(rows, STREAMS, 160, seed=seed, dtype=torch.bfloat16)
    cut = mhc_launch.Tiling(bt, bd, 4)
    mixed, sums = mhc_launch.mixed(*closing(s)[:1], closing(s)[1:], s["fn"], cut)
    torch.testing.assert_close(mixed, mhc.hc_out_torch(*closing(s)), atol=1e-5, rtol=2.0**-7)
    flat = mixed.float().flatten(1)
    totals = sums.sum(1)
    torch.testing.assert_close(totals[:, :LOGITS], flat @ s["fn"].t(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(totals[:, LOGITS], flat.square().sum(1), atol=1e-3, rtol=1e-5)


FAULTS = {
    "comb transposed": lambda s: s | {"comb": s["comb"].transpose(1, 2).contiguous()},
    "post halved": lambda s: s | {"post": s["post"] / 2},
    "one summand lost": lambda s: s | {"parts": s["parts"][:, :2].contiguous()},
    "base ignored": lambda s: s | {"base": torch.zeros_like(s["base"])},
    "fn's streams swapped": lambda s: s | {"fn": s["fn"].roll(96, 1)},
    "norm ignored": lambda s: s | {"norm": torch.ones_like(s["norm"])},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_planted_fault(fault):
    """The tolerance hides a mistake in the kernel's input."""
    s = site(3, 96, torch.bfloat16)
    wrong = FAULTS[fault](s)
    mixed, got = mhc.hc_turn_triton(*closing(wrong), *weights(wrong), None, act_group=32, **MIXING)
    other, twin = mhc.hc_turn_torch(*closing(s), *weights(s), None, act_group=32, **MIXING)
    if torch.allclose(mixed.float(), other.float(), atol=1e-5, rtol=2.0**-7):
        with pytest.raises(AssertionError):
            agree(got, twin, torch.bfloat16)


# ---------------------------------------------------------------- real shapes


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (4, 5120), (64, 4096), (2048, 4096)])
def test_real_shapes_equal_their_twins(width, rows):
    """A turn at a real width differs from the twin's by more than bfloat16's rounding."""
    s = site(rows, width, torch.bfloat16)
    mixed, got = mhc.hc_turn_triton(*closing(s), *weights(s), None, act_group=32, **MIXING)
    torch.testing.assert_close(mixed, mhc.hc_out_torch(*closing(s)), atol=1e-4, rtol=2.0**-7)
    twin = mhc.hc_in_torch(mixed, *weights(s), None, act_group=32, **MIXING)
    agree(got, twin, torch.bfloat16)
