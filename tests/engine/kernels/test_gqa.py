"""Grouped-query attention and its preparation: kernels against their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.device.rows import build_rows
from engine.kernels import gqa, gqa_decode
from engine.kernels.rope import rope_table
from engine.kernels.rows import Rows
from engine.plan.step import Chunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, D, HEADS, KEY_HEADS = 16, 32, 6, 2


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def pools(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return rand(12, BLOCK, KEY_HEADS, D, dtype=dtype), rand(12, BLOCK, KEY_HEADS, D, dtype=dtype)


def chunks(*spans: tuple[int, int]) -> list[Chunk]:
    """(start, length) of each sequence, in scattered blocks."""
    return [
        Chunk(str(i), i + 1, start, (1,) * length, tuple((5 * i + 3 * j) % 11 + 1 for j in range(4)), True)
        for i, (start, length) in enumerate(spans)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_preparation_equals_its_twin(dtype: torch.dtype) -> None:
    """Queries are returned, keys and values written at their rows and nowhere else."""
    torch.manual_seed(0)
    rows, _ = build_rows(chunks((0, 3), (17, 1), (30, 4)), block_size=BLOCK, device=DEVICE)
    qkv = rand(rows.num_rows, (HEADS + 2 * KEY_HEADS) * D, dtype=dtype)
    norms = rand(D), rand(D)
    freqs = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64, device=DEVICE) / D)
    rope = rope_table(freqs, 64)
    found = []
    for prepare in (gqa.prepare_qkv_torch, gqa.prepare_qkv_triton):
        torch.manual_seed(1)
        keys, values = pools(dtype)
        q = prepare(qkv, *norms, 1e-6, rope, rows, keys, values, heads=HEADS)
        found.append((q, keys, values))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_chunks_equals_its_twin(dtype: torch.dtype) -> None:
    """Every row sees its sequence up to itself, whatever lies behind."""
    torch.manual_seed(0)
    rows, _ = build_rows(chunks((0, 5), (20, 9)), block_size=BLOCK, device=DEVICE)
    keys, values = pools(dtype)
    q = rand(rows.num_rows, HEADS, D, dtype=dtype)
    wanted = gqa.attend_gqa_torch(q, keys, values, rows)
    found = gqa.attend_gqa_triton(q, keys, values, rows)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    sees_more = gqa.attend_gqa_torch(q, keys, values, _later(rows))
    assert (sees_more - wanted).abs().max() > 0.05  # the comparison notices one position too many


def decode(
    dtype: torch.dtype, starts: list[int], most: int, dim: int = D
) -> list[tuple[torch.Tensor, ...]]:
    """(o, keys, values) of the twin and of the kernel, for sequences of up to `most` positions."""
    count = -(-most // BLOCK)
    count += count % 5 == 0  # so that steps of five visit every block
    some = [
        Chunk(str(i), i + 1, start, (1,), tuple(1 + i * count + (5 * j + 3) % count for j in range(count)), True)
        for i, start in enumerate(starts)
    ]  # fmt: skip
    rows, _ = build_rows(some, block_size=BLOCK, device=DEVICE)
    rows = replace(rows, max_end=most)
    torch.manual_seed(0)
    qkv = rand(rows.num_rows, (HEADS + 2 * KEY_HEADS) * dim, dtype=dtype)
    norms = rand(dim), rand(dim)
    freqs = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=DEVICE) / dim)
    rope = rope_table(freqs, most)
    found = []
    for attend in (gqa.decode_gqa_torch, gqa_decode.decode_gqa_triton):
        torch.manual_seed(1)
        keys, values = (
            rand(1 + len(starts) * count, BLOCK, KEY_HEADS, dim, dtype=dtype) for _ in range(2)
        )
        o = attend(qkv, *norms, 1e-6, rope, rows, keys, values, heads=HEADS)
        found.append((o, keys, values))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("starts", "most"),
    [([0], 16), ([1, 63, 64], 80), ([65, 200, 1023, 0, 640, 129], 1100), ([1200], 1264)],
    ids=["first", "one share", "shares", "all shares"],
)
def test_decoding_equals_its_twin(dtype: torch.dtype, starts: list[int], most: int) -> None:
    """Any number of shares: the twin's output, key and value of each row written where they belong."""
    for one, other in zip(*decode(dtype, starts, most), strict=True):
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_of_the_values_equal_the_twin(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Values in pieces of columns, in one share and in many: each piece in its place."""
    monkeypatch.setattr(gqa_decode, "_FEW", (64, 4, 1))
    monkeypatch.setattr(gqa_decode, "_PIECES", pieces)
    monkeypatch.setattr(gqa_decode, "_PROGRAMS", 6 * pieces * gqa_decode._MOST_SPLITS)
    for one, other in zip(*decode(torch.bfloat16, [3, 700, 64], 1100, 128), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dropped", [1, 5, 12])
def test_a_share_that_is_left_out_is_seen(dropped: int) -> None:
    """A row whose shares are counted as if the last were not there gives another output."""
    wanted, found = decode(torch.float32, [64 * dropped + 63], 1100)
    torch.testing.assert_close(found[0], wanted[0], atol=2e-5, rtol=2e-5)
    fewer, _ = decode(torch.float32, [64 * dropped - 1], 1100)
    assert (fewer[0] - wanted[0]).abs().max() > 0.05


def _later(rows: Rows) -> Rows:
    return replace(rows, positions=rows.positions + 1, max_end=rows.max_end + 1)


@pytest.mark.parametrize("parts", [0, 1, 9])
def test_residual_and_norm_equal_their_twin(parts: int) -> None:
    """Summands are added in order, then normed; none leaves the residual as it is."""
    torch.manual_seed(0)
    h, weight = rand(3, 48, dtype=torch.bfloat16), rand(48)
    summands = rand(3, parts, 48) if parts else None
    wanted = gqa.add_norm_torch(h, summands, weight, 1e-6)
    found = gqa.add_norm_triton(h, summands, weight, 1e-6)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_decoding_at_real_widths(count: int) -> None:
    """Qwen3-30B's heads in bfloat16, sequences of any length, called and replayed, twice each."""
    torch.manual_seed(count)
    heads, key_heads, dim, most = 32, 4, 128, 4096
    starts = [(977 * i + 5) % 3000 if i else 2900 for i in range(count)]
    blocks = most // 256
    some = [
        Chunk(str(i), i + 1, at, (1,), tuple(range(1 + i * blocks, 1 + (i + 1) * blocks)), True)
        for i, at in enumerate(starts)
    ]
    rows, _ = build_rows(some, block_size=256, device=DEVICE)
    rows = replace(rows, max_end=most, spans=())
    qkv = rand(count, (heads + 2 * key_heads) * dim, dtype=torch.bfloat16)
    norms = rand(dim).abs(), rand(dim).abs()
    freqs = 1e6 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=DEVICE) / dim)
    rope = rope_table(freqs, most)
    keys, values = (
        rand(1 + count * blocks, 256, key_heads, dim, dtype=torch.bfloat16) for _ in range(2)
    )
    pools = keys.clone(), values.clone()
    wanted = gqa.decode_gqa_torch(qkv, *norms, 1e-6, rope, rows, *pools, heads=heads)

    def call() -> torch.Tensor:
        return gqa_decode.decode_gqa_triton(
            qkv, *norms, 1e-6, rope, rows, keys, values, heads=heads
        )

    found = [call(), call()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for _ in range(2):
        graph.replay()
        found.append(replayed.clone())
    for one in found:
        torch.testing.assert_close(one, wanted, atol=2e-2, rtol=2e-2)
        assert torch.equal(one, found[0])  # shares are added in order, whoever comes last
    torch.testing.assert_close(keys, pools[0], atol=2e-2, rtol=2e-2)
    assert torch.equal(values, pools[1])
