"""One row of JSON per measurement: the figures, and what is needed to judge and repeat them.

Every benchmark uses these names, so that rows of different files can be compared: bench, geometry,
mode, batch, prompt_tokens, and figures as `spread` objects with their unit in the name.
"""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
import torch

from engine.options import usable_cores

ROOT = Path(__file__).parents[1]
#: Where rows are written, and read for README. The server takes variables that begin with BATHYAL_
#: for settings of its own, and refuses what is none.
RESULTS = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))
#: Packages whose version can change a figure.
PACKAGES = ("bathyal", "torch", "triton", "flashinfer-python", "numpy", "deepseek-recipe")


def percentile(values: Sequence[float], percent: float) -> float:
    """Give a percentile by linear interpolation between the two nearest values.

    Args:
        values: at least one, in any order.
        percent: 0..100.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Sum repeats up: median, p10, p90, and how many there were.

    Args:
        values: one figure per repeat, at least one.
        digits: decimals kept.
    """
    return {
        "median": round(statistics.median(values), digits),
        "p10": round(percentile(values, 10), digits),
        "p90": round(percentile(values, 90), digits),
        "n": len(values),
    }


def describe_device(device: str) -> dict[str, Any]:
    """Describe what a measurement ran on.

    Args:
        device: "cpu" or "cuda".
    """
    found: dict[str, Any] = {"kind": device, "cpu": _cpu_name(), "cores": usable_cores()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_gb"] = round(properties.total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    return found


def gpu_pace() -> dict[str, float]:
    """How fast the GPU's processors run now, and why: figures of two boards differ by some percent.

    Returns:
        sm_mhz, celsius and watts; nothing without a GPU, or where the driver's library is not read.
    """
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(),
            "celsius": torch.cuda.temperature(),
            "watts": round(torch.cuda.power_draw() / 1e3),
        }
    except Exception:  # pynvml is absent, or knows another error than torch's
        return {}


def versions() -> dict[str, str]:
    """Give the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Give the commit measured; "+changes" where the working tree differs from it.

    A copy without git's folder, or in another one's, is named by the variable BENCH_COMMIT.
    """
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    short = _git("rev-parse", "--short=12", "HEAD")
    if short is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "engine", "gateway", "parsers")
    return short + ("+changes" if changed else "")


def command(module: str) -> str:
    """Give the command line of this run, as it is to be typed in the repository's root.

    Args:
        module: name of the benchmark's module.
    """
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def make_rows(
    module: str, device: str, figures: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Add to each measurement what it ran on, when, and how.

    Args:
        module: name of the benchmark's module.
        device: "cpu" or "cuda".
        figures: bench, geometry, mode, batch, prompt_tokens and the measured values of each row.
    """
    common = {
        "device": describe_device(device),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(module),
    }
    return [{**row, **common} for row in figures]


def write_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to bench/results/NAME.jsonl, in place of an earlier run's.

    Args:
        name: file name without its ending.
        rows: from `make_rows`.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*args: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def fill_finite(tensor: torch.Tensor) -> None:
    """Fill a pool's memory with what some past might have left, numbers or records, in place."""
    if tensor.dtype == torch.uint8:
        tensor.random_(0x30, 0x40)  # codes, scales and halves of bfloat16 numbers, all finite
    else:
        tensor.normal_()
