"""Quantised linears of other publishers' checkpoints, as `Matrix`: read as stored, or repacked.

FP8 in blocks or by channel, INT8 by channel and NVFP4 are stored as products read them. AWQ and GPTQ
pack eight INT4 codes into a word in orders of their own and keep [in, out]; those are repacked into
rows of nibbles. A repacked expert must not depend on whoever is repacked beside it, or it could not
be moved alone: `repack_experts` proves that by repacking everybody twice, in different company
(issue 7, engine.md A4 "Loading").

Layouts: the published checkpoints of each method (quantization_config of their config.json).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.api import EngineError
from engine.kernels.formats import NVFP4_GROUP, Matrix
from engine.qwen3_config import Quantisation

#: Where AWQ puts the columns of eight in a word, lowest four bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Raw = Mapping[str, Tensor]
Repack = Callable[[Raw], Matrix]


def stored_names(method: str) -> tuple[str, ...]:
    """Names of the tensors of a linear, after the linear's own and a dot."""
    return _STORED[method]


def stored_shapes(how: Quantisation, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a linear [rows, columns], by name; () for a scalar."""
    n, k, g = rows, columns, how.group
    if how.method in ("int4_awq", "int4_gptq"):
        words = (k, n // 8) if how.method == "int4_awq" else (k // 8, n)
        return {"qweight": words, "qzeros": (k // g, n // 8), "scales": (k // g, n)}
    if how.method == "nvfp4":
        return {"weight": (n, k // 2), "weight_scale": (n, k // g), "weight_scale_2": ()}
    if how.method == "fp8_block":
        return {"weight": (n, k), "weight_scale_inv": (-(-n // g), -(-k // g))}
    return {"weight": (n, k), "weight_scale": (n, 1)}


def read_linear(how: Quantisation, raw: Raw) -> Matrix:
    """Make a matrix [N, K] of a linear's tensors.

    Args:
        how: quantisation of the checkpoint.
        raw: by the names of `stored_names`.
    """
    if how.method in ("int4_awq", "int4_gptq"):
        (found,) = repack_experts(repacker(how), [raw], chunk=1)
        return found
    if how.method == "nvfp4":
        rows = raw["weight"].shape[0]
        # One number a matrix; kept a row, so that joined matrices each keep their own.
        overall = raw["weight_scale_2"].to(torch.float32).reshape(1, 1).expand(rows, 1)
        extra = (("global_scale", overall.contiguous()),)
        return Matrix("nvfp4", raw["weight"], raw["weight_scale"], NVFP4_GROUP, extra)
    scale = raw["weight_scale_inv" if how.method == "fp8_block" else "weight_scale"]
    block = how.group if how.method == "fp8_block" else 0
    return Matrix(how.method, raw["weight"], scale.to(torch.float32), block)


def repacker(how: Quantisation) -> Repack:
    """Give what repacks a stack of linears, tensors [n, ...] each, in a method's own layout."""

    def awq(raw: Raw) -> Matrix:
        order = torch.tensor(AWQ_ORDER).argsort()
        codes = _unpack(raw["qweight"], -1, order).transpose(-1, -2)
        zeros = _unpack(raw["qzeros"], -1, order).transpose(-1, -2)
        return _nibble_matrix("int4_awq", codes, raw["scales"], zeros, how.group)

    def gptq(raw: Raw) -> Matrix:
        order = torch.arange(8)
        codes = _unpack(raw["qweight"], -2, order).transpose(-1, -2)
        zeros = _unpack(raw["qzeros"], -1, order).transpose(-1, -2)
        return _nibble_matrix("int4_gptq", codes, raw["scales"], zeros, how.group)

    return awq if how.method == "int4_awq" else gptq


def _unpack(words: Tensor, dim: int, order: Tensor) -> Tensor:
    """Four-bit codes uint8 of int32 words, eight times as many along `dim`."""
    shifts = order.to(words.device, torch.int32) * 4
    codes = (words.unsqueeze(-1) >> shifts) & 15
    if dim == -1:
        return codes.flatten(-2).to(torch.uint8)
    return codes.transpose(-1, -2).flatten(-3, -2).to(torch.uint8)


def _nibble_matrix(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Matrix:
    """Pack codes [.., N, K] into bytes; scales [.., K / g, N] and zeros [.., N, K / g] beside."""
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Matrix(
        "int4_awq" if kind == "int4_awq" else "int4_gptq",
        packed.contiguous(),
        scales.transpose(-1, -2).to(torch.float32).contiguous(),
        group,
        (("zeros", zeros.contiguous()),),
    )


def repack_experts(repack: Repack, experts: Sequence[Raw], *, chunk: int) -> list[Matrix]:
    """Repack experts `chunk` at a time, twice in different company, and compare.

    A last chunk that is short is filled up with other experts, never with memory that nobody wrote.

    Args:
        repack: takes tensors [chunk, ...] and gives a stack.
        experts: tensors of each, by name.
        chunk: how many at a time.

    Returns:
        one matrix an expert.

    Raises:
        EngineError: an expert comes out differently beside others, so it cannot move alone.
    """
    count = len(experts)
    found = _in_chunks(repack, experts, list(range(count)), chunk)
    again = _in_chunks(repack, experts, [*range(1, count), 0], max(1, chunk - 1))
    for expert in range(count):
        for name, tensor in found[expert].tensors.items():
            other = again[expert].tensors[name]
            if not torch.equal(_bytes(tensor), _bytes(other)):
                raise EngineError(
                    f"experts: repacking expert {expert} gives another {name} beside other"
                    " experts; a format whose experts depend on each other cannot be paged"
                )
    return found


def _in_chunks(
    repack: Repack, experts: Sequence[Raw], order: list[int], chunk: int
) -> list[Matrix]:
    found: dict[int, Matrix] = {}
    for first in range(0, len(order), chunk):
        part = order[first : first + chunk]
        stack = repack(_stack(experts, fill(part, order, chunk)))
        found |= {expert: stack[place] for place, expert in enumerate(part)}
    return [found[expert] for expert in sorted(found)]


def fill(part: list[int], order: list[int], chunk: int) -> list[int]:
    """Experts of a whole chunk: those of a short one, then others from the front."""
    return [*part, *(order[i % len(order)] for i in range(chunk - len(part)))]


def _stack(experts: Sequence[Raw], chosen: list[int]) -> Raw:
    return {name: torch.stack([experts[e][name] for e in chosen]) for name in experts[chosen[0]]}


_STORED = {
    "fp8_block": ("weight", "weight_scale_inv"),
    "fp8_channel": ("weight", "weight_scale"),
    "int8_channel": ("weight", "weight_scale"),
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
    "int4_awq": ("qweight", "qzeros", "scales"),
    "int4_gptq": ("qweight", "qzeros", "scales"),
}


def _bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor, by which NaN equals itself."""
    return tensor.flatten().view(torch.uint8)
