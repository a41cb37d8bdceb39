"""Compares the model with golden tensors.

A folder to verify holds `verify.json`:

    weights, config, golden   file names; config and weights are read by `naming`
    naming                    "official" (the folder is a checkpoint) or "transformers"
    architecture              "v4" or "v4.1": how the weights are read
    inputs                    name of the int64 [batch, time] token ids in the golden file
    outputs                   {name: description}; "logits" [batch, time, vocab], or the name of an
                              intermediate value as Model.forward's tap gives it, with [batch, time]
                              in front
    atol                      largest absolute difference that passes
    quantised                 whether activations and caches are rounded
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file
from torch import Tensor

from engine.api import EngineError
from engine.convert import convert
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model.checkpoint import RoundTrips, load_model
from engine.model.v4 import Model
from engine.plan.step import Chunk

BLOCK_SIZE = 256


class VerifyError(EngineError):
    """A folder that cannot be verified; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How one output compares: its name, the largest absolute difference, and the bound."""

    output: str
    max_abs_diff: float
    atol: float

    @property
    def ok(self) -> bool:
        """Whether it is within the bound; a NaN never is."""
        return self.max_abs_diff <= self.atol


def verify(folder: Path, atol: float | None = None) -> list[Difference]:
    """Run the folder's inputs and compare every output.

    Args:
        folder: with verify.json.
        atol: instead of the folder's own bound.

    Raises:
        VerifyError: verify.json or a golden tensor is absent or malformed.
        EngineError: the checkpoint cannot be loaded or converted.
    """
    spec = _spec(folder)
    golden_path = folder / spec["golden"]
    if not golden_path.is_file():
        raise VerifyError(f"{golden_path}: expected golden tensors, got no such file")
    golden = load_file(golden_path)
    for name in (spec["inputs"], *spec["outputs"]):
        if name not in golden:
            raise VerifyError(f"{golden_path}: expected {name}, got {sorted(golden)}")
    values = run(load(folder, spec), golden[spec["inputs"]])
    differences = []
    for name in spec["outputs"]:
        if name not in values:
            raise VerifyError(f"verify.json: outputs: expected a tap's name or logits, got {name}")
        if values[name].shape != golden[name].shape:
            want, got = list(golden[name].shape), list(values[name].shape)
            raise VerifyError(f"{name}: expected {want}, got {got}")
        diff = float((values[name] - golden[name]).abs().max())
        differences.append(Difference(name, diff, spec["atol"] if atol is None else atol))
    return differences


def load(folder: Path, spec: dict[str, Any] | None = None) -> Model:
    """Load the model a verify folder is about, in float32 on the CPU."""
    spec = _spec(folder) if spec is None else spec
    mode: RoundTrips = "on" if spec["quantised"] else "off"
    if spec["naming"] == "official":
        return load_model(folder, round_trips=mode)
    with tempfile.TemporaryDirectory() as official:
        convert(
            folder,
            Path(official),
            architecture=spec["architecture"],
            config_name=spec["config"],
            weights_name=spec["weights"],
        )
        return load_model(official, round_trips=mode)


def run(model: Model, input_ids: Tensor) -> dict[str, Tensor]:
    """All taps and the logits of whole sequences, each run as one chunk.

    Args:
        model: on the CPU.
        input_ids: int64 [batch, time].

    Returns:
        name -> [batch, time, ...].
    """
    batch, time = input_ids.shape
    per_request = -(-time // BLOCK_SIZE)
    pool = KVPool(
        model.config,
        num_blocks=1 + batch * per_request,
        num_slots=1 + batch,
        block_size=BLOCK_SIZE,
    )
    chunks = [
        Chunk(
            request_id=str(row),
            slot=1 + row,
            start=0,
            token_ids=tuple(input_ids[row].tolist()),
            block_ids=tuple(range(1 + row * per_request, 1 + (row + 1) * per_request)),
            wants_logits=False,
        )
        for row in range(batch)
    ]
    values: dict[str, Tensor] = {}
    logits = model.forward(
        ForwardBatch.build(chunks), pool, all_rows=True, tap=lambda n, t: values.update({n: t})
    )
    values["logits"] = logits
    return {name: value.reshape(batch, time, *value.shape[1:]) for name, value in values.items()}


def _spec(folder: Path) -> dict[str, Any]:
    path = folder / "verify.json"
    try:
        spec = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise VerifyError(f"{path}: expected a verify.json, got no such file") from None
    except orjson.JSONDecodeError as error:
        raise VerifyError(f"{path}: not JSON: {error}") from None
    wanted: dict[str, type | tuple[type, ...]] = {
        "weights": str,
        "naming": str,
        "config": str,
        "golden": str,
        "inputs": str,
        "outputs": dict,
        "atol": (int, float),
        "quantised": bool,
        "architecture": str,
    }
    problems = [
        f"{name}: expected {kind}, got {spec.get(name)!r}"
        for name, kind in wanted.items()
        if not isinstance(spec, dict) or not isinstance(spec.get(name), kind)
    ]
    for name, accepted in (
        ("naming", ("official", "transformers")),
        ("architecture", ("v4", "v4.1")),
    ):
        if not problems and spec[name] not in accepted:
            problems.append(f"{name}: expected one of {accepted}, got {spec[name]!r}")
    if problems:
        raise VerifyError(f"{path}: " + "; ".join(problems))
    assert isinstance(spec, dict)
    return spec
