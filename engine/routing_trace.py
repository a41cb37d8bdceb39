"""A recorded routing trace: which experts every step of real serving was routed to, as a file.

A safetensors file, so that any tool reads it. Metadata (strings): `format` "bathyal-routing",
`version` "1", `num_experts` E, `num_experts_per_tok` k, `num_hidden_layers` L. Tensors of layer i:

* `layers.{i}.experts` int16 [R, k]: experts of each row, in order of steps; padding rows are left out.
* `layers.{i}.rows` int32 [S]: rows of each step; sums to R.
* `layers.{i}.prompt` uint8 [S]: 1 for a pass over prompts, 0 for a decode step.

Steps of different layers need not be as many: a prompt's pass may be cut off. Written by an engine
with `record_routing`, read by `bathyal engine plan --trace`. Loads no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.api import EngineError
from engine.files import usual_file

FORMAT, VERSION = "bathyal-routing", "1"
_NUMBERS = ("num_experts", "num_experts_per_tok", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one layer.

    Args:
        experts: int16 [rows, k].
        prompt: whether it was a pass over prompts.
    """

    experts: NDArray[np.int16]
    prompt: bool


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """A trace.

    Args:
        num_experts: E.
        per_row: k.
        layers: steps of each layer.
    """

    num_experts: int
    per_row: int
    layers: tuple[tuple[Step, ...], ...]

    def decode_steps(self) -> list[list[list[int]]]:
        """Distinct experts of each decode step, by layer: what engine.plan.paging reads.

        Prompts are left out: they sweep through most experts, whatever the slots are.
        """
        return [
            [np.unique(step.experts).tolist() for step in steps if not step.prompt]
            for steps in self.layers
        ]


def write_problem(path: Path) -> str | None:
    """Say what is in the way of writing a trace to a path; None where nothing is."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        return "a link that leads back to itself"
    if target.exists():
        if not target.is_file():
            return "a folder" if target.is_dir() else "a device, a pipe or a socket"
        return None if os.access(target, os.W_OK) else "a file that may not be written"
    if not target.parent.is_dir():
        return "a file in a folder that does not exist"
    return (
        None if os.access(target.parent, os.W_OK) else "a file in a folder that may not be written"
    )


def write_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a trace, as other files are written: where a link leads, with the mode it has or gets.

    Raises:
        OSError: the file cannot be written.
    """
    numbers = (trace.num_experts, trace.per_row, len(trace.layers))
    tensors: dict[str, NDArray[np.generic]] = {}
    for index, steps in enumerate(trace.layers):
        name = f"layers.{index}."
        rows = [step.experts for step in steps]
        none = np.empty((0, trace.per_row), np.int16)
        tensors[name + "experts"] = np.ascontiguousarray(np.concatenate([none, *rows]))
        tensors[name + "rows"] = np.array([len(r) for r in rows], np.int32)
        tensors[name + "prompt"] = np.array([step.prompt for step in steps], np.uint8)
    told = {"format": FORMAT, "version": VERSION} | dict(
        zip(_NUMBERS, map(str, numbers), strict=True)
    )
    with usual_file(path) as target:
        save_file(tensors, target, metadata=told)


def read_trace(path: Path) -> RoutingTrace:
    """Read a trace.

    Raises:
        EngineError: the file is none, with what was expected and what came.
    """
    try:
        with safe_open(path, framework="np") as opened:
            told = opened.metadata() or {}
            kind = told.get("format"), told.get("version")
            if kind != (FORMAT, VERSION):
                raise EngineError(
                    f"{path}: expected a routing trace, format {FORMAT!r} version {VERSION!r}, got"
                    f" format {kind[0]!r} version {kind[1]!r}"
                )
            experts, per_row, layers = (int(told[name]) for name in _NUMBERS)
            found = tuple(_steps(opened, path, i, experts, per_row) for i in range(layers))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise EngineError(f"{path}: not a routing trace: {error}") from None
    return RoutingTrace(experts, per_row, found)


def _steps(opened: Any, path: Path, layer: int, num_experts: int, per_row: int) -> tuple[Step, ...]:
    experts, rows, prompt = (
        opened.get_tensor(f"layers.{layer}.{name}") for name in ("experts", "rows", "prompt")
    )
    problems = []
    if experts.ndim != 2 or experts.shape[1] != per_row:
        problems.append(f"experts: expected [rows, {per_row}], got {list(experts.shape)}")
    elif experts.size and not 0 <= experts.min() <= experts.max() < num_experts:
        problems.append(
            f"experts: expected ids from 0 to {num_experts - 1}, got"
            f" {experts.min()} to {experts.max()}"
        )
    if rows.ndim != 1 or rows.shape != prompt.shape or int(rows.sum()) != len(experts):
        problems.append(
            f"rows: expected one number a step that sum to {len(experts)}, got {list(rows.shape)}"
            f" that sum to {int(rows.sum())}, for {list(prompt.shape)} steps"
        )
    if problems:
        raise EngineError(f"{path}: layer {layer}: " + "; ".join(problems))
    ends = np.cumsum(rows)
    return tuple(
        Step(experts[end - count : end], bool(flag))
        for end, count, flag in zip(ends, rows, prompt, strict=True)
    )
