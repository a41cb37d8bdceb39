"""`bathyal doctor`: what this installation is, and whether it could serve.

Every line is a finding; a finding that would stop the server counts as a problem. Loads no torch:
the device is asked of the driver, and versions are read from package metadata.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.api import EngineError, ModelInfo
from engine.architectures import read_config
from engine.device.refusals import Gpu, check_engine
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
#: Numbers of the compute capability's two parts among the driver's attributes of a device.
_CAPABILITY = (75, 76)


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


def _device(gpus: list[Gpu]) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if not gpus:
        return Finding("device", f"CPU, {cores} cores usable; no NVIDIA driver answers")
    names = ", ".join(gpu.name for gpu in gpus)
    return Finding("device", f"{names}; CPU, {cores} cores usable")


def _gpus() -> list[Gpu]:
    """What the driver says of each."""
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
        capability = (ctypes.c_int(), ctypes.c_int())
        failed = driver.cuDeviceGetName(buffer, len(buffer), ordinal)
        failed = failed or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), ordinal)
        for part, attribute in zip(capability, _CAPABILITY, strict=True):
            failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, ordinal)
        if not failed:
            major, minor = capability
            gpus.append(Gpu(buffer.value.decode(), (major.value, minor.value), memory.value))
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


def _options(model: Path, options: EngineConfig, gpus: list[Gpu]) -> Iterator[Finding]:
    """Every option of the engine, which rule sets it, and what a start would refuse."""
    gpu = gpus[0] if gpus else None
    try:
        config = read_config(model)
        weight_bytes = sum(shard.stat().st_size for shard in model.glob("*.safetensors"))
        facts = facts_of(
            config,
            options,
            gpu=None if gpu is None else gpu.name,
            gpu_nbytes=None if gpu is None else gpu.nbytes,
            cores=usable_cores(),
            weight_bytes=weight_bytes,
        )
        resolved = resolve(options, facts)
    except EngineError as error:
        yield Finding("engine options", str(error).removeprefix("engine options: "), ok=False)
        return
    on_gpu = resolved.config.device == "cuda"
    if on_gpu and gpu is None:
        yield Finding("device", "cuda asked for, but no NVIDIA driver answers", ok=False)
    else:
        has_triton = importlib.util.find_spec("triton") is not None
        served = gpu if on_gpu else None
        try:
            check_engine(config, resolved.config, options, served, has_triton=has_triton)
        except EngineError as error:
            yield Finding("engine options", str(error), ok=False)
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
