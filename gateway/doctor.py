"""`bathyal doctor`: what this installation is, and whether it could serve.

Every line is a finding; a finding that would stop the server counts as a problem. Loads no torch:
the device is asked of the driver, and versions are read from package metadata.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.api import EngineError, ModelInfo
from engine.architectures import read_config
from engine.options import EngineConfig, usable_cores
from engine.resolve import facts_of, resolve
from gateway.backends.embedded import EmbeddedBackend
from parsers import BootError, Codec, ServedModel

ROOMS = ("gateway", "engine", "parsers", "conformance")
_PACKAGES = (
    "bathyal",
    "deepseek-recipe",
    "torch",
    "tokenizers",
    "safetensors",
    "starlette",
    "uvicorn",
)
_OPTIONAL = ("triton", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    text: str
    ok: bool = True


def examine(model: Path, options: EngineConfig) -> list[Finding]:
    """Look at everything that a start needs.

    Args:
        model: folder of the checkpoint that would be served.
        options: of the engine that would serve it.
    """
    gpus = _gpus()
    return [
        *_versions(),
        _device(gpus),
        _rooms(),
        *_checkpoint(model),
        *_options(model, options, gpus),
    ]


def _versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for package in (*_PACKAGES, *_OPTIONAL):
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            needed = package not in _OPTIONAL
            yield Finding(package, "not installed" + ("" if needed else " (optional)"), not needed)


def _device(gpus: list[tuple[str, int]]) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if not gpus:
        return Finding("device", f"CPU, {cores} cores usable; no NVIDIA driver answers")
    names = ", ".join(name for name, _ in gpus)
    return Finding("device", f"{names}; CPU, {cores} cores usable")


def _gpus() -> list[tuple[str, int]]:
    """Names and bytes of memory."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    gpus = []
    for ordinal in range(count.value):
        buffer, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        named = driver.cuDeviceGetName(buffer, len(buffer), ordinal) == 0
        if named and driver.cuDeviceTotalMem_v2(ctypes.byref(memory), ordinal) == 0:
            gpus.append((buffer.value.decode(), memory.value))
    return gpus


def _rooms() -> Finding:
    """Find another distribution's package under one of our four generic names."""
    parents = {room: _parent(room) for room in ROOMS}
    if len(set(parents.values())) == 1:
        return Finding("rooms", f"all four in {parents['gateway']}")
    where = ", ".join(f"{room} in {parent}" for room, parent in parents.items())
    return Finding("rooms", f"another distribution owns one of our names: {where}", ok=False)


def _parent(room: str) -> str:
    try:
        module = importlib.import_module(room)
    except ImportError as error:
        return f"(not importable: {error})"
    return str(Path(str(module.__file__)).parents[1])


def _checkpoint(model: Path) -> Iterator[Finding]:
    try:
        info = EmbeddedBackend(model).info
    except EngineError as error:
        yield Finding("checkpoint", str(error), ok=False)
        return
    shards = sorted(model.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards) / 1e6
    yield Finding(
        "checkpoint",
        f"{model}: {_FAMILY[info.version]}, context {info.max_model_len} tokens,"
        f" {len(shards)} weight file(s), {size:.1f} MB",
        ok=bool(shards),
    )
    if info.version != "plain":
        yield _special_tokens(info)


#: What a version's model is called.
_FAMILY = {"v4": "DeepSeek-V4", "v4.1": "DeepSeek-V4.1", "plain": "completions only"}


def _options(model: Path, options: EngineConfig, gpus: list[tuple[str, int]]) -> Iterator[Finding]:
    """Every option of the engine, and which rule sets it."""
    try:
        config = read_config(model)
        weight_bytes = sum(shard.stat().st_size for shard in model.glob("*.safetensors"))
        gpu, gpu_nbytes = gpus[0] if gpus else (None, None)
        facts = facts_of(
            config,
            options,
            gpu=gpu,
            gpu_nbytes=gpu_nbytes,
            cores=usable_cores(),
            weight_bytes=weight_bytes,
        )
        resolved = resolve(options, facts)
    except EngineError as error:
        yield Finding("engine options", str(error).removeprefix("engine options: "), ok=False)
        return
    if resolved.config.device == "cuda" and gpu is None:
        yield Finding("device", "cuda asked for, but no NVIDIA driver answers", ok=False)
    for line in resolved.lines():
        yield Finding("engine option", line)


def _special_tokens(info: ModelInfo) -> Finding:
    model = ServedModel(
        name=info.name,
        version=info.version,
        tokenizer_path=info.tokenizer_path,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    try:
        Codec.load(model)
    except BootError as error:
        return Finding("special tokens", str(error), ok=False)
    return Finding("special tokens", "a thinking prompt with tools encodes")
