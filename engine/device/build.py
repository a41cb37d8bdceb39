"""Builds what runs steps: model, pools and runner, from a checkpoint and resolved options."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.api import EngineError
from engine.architectures import AnyConfig, read_config
from engine.config import ModelConfig
from engine.device.fast_runner import FastRunner
from engine.device.graphs import Captured
from engine.device.kvpool import KVPool
from engine.device.qwen_pool import QwenPool
from engine.device.recorder import RoutingRecorder
from engine.device.refusals import Gpu, check_engine
from engine.device.runner import ModelRunner
from engine.expert_paging import Paging, paging_of
from engine.kernels.at_once import GridError
from engine.model.checkpoint import Checkpoint, CheckpointError, load_model
from engine.model.fast import FastModel
from engine.model.loading import load_fast_model
from engine.model.qwen3 import Qwen3Model
from engine.model.qwen3_checkpoint import QwenCheckpoint
from engine.model.qwen3_loading import load_qwen3
from engine.model.speculate import Speculator, load_drafter
from engine.options import PROMPT_BUCKETS, TAIL_BUCKETS, EngineConfig, usable_cores
from engine.plan.layout import layout_fingerprint
from engine.plan.records import Forms
from engine.plan.replay import Replay, tail_of, tail_problems
from engine.qwen3_config import Qwen3Config
from engine.resolve import Resolved, facts_of, resolve
from engine.speculation import draft_tokens, drafting_of

logger = logging.getLogger(__name__)
# What `settle` has kept is given back at exit: else libraries that count objects report leaks.
atexit.register(gc.unfreeze)


@dataclass(frozen=True, slots=True)
class Built:
    """A model that is ready to serve.

    Args:
        config: of the model.
        runner: runs steps.
        options: that count; nothing is left open.
        salt: of the prefix cache: everything beside the tokens that state depends on.
        replay: how prompts are processed.
        load_seconds: from the checkpoint to weights in memory.
        ready_seconds: from there to captured and warmed up.
    """

    config: AnyConfig
    runner: ModelRunner | FastRunner
    options: EngineConfig
    salt: bytes
    replay: Replay
    load_seconds: float
    ready_seconds: float


def build(path: Path, options: EngineConfig) -> Built:
    """Load a checkpoint and make it ready, in the thread that will run it.

    Sets the number of torch's CPU threads, which is a property of the calling thread.

    Args:
        path: folder of the checkpoint.
        options: how to run it.

    Raises:
        EngineError: the checkpoint, the device or the options cannot be served; says which.
    """
    config = read_config(path)
    resolved = resolve_here(path, config, options)
    for line in resolved.lines():
        logger.info("engine option %s", line)
    given, options = options, resolved.config
    if options.device == "cpu":
        assert options.cpu_threads is not None
        torch.set_num_threads(options.cpu_threads)
    device = torch.device(options.device)
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    has_triton = importlib.util.find_spec("triton") is not None
    check_engine(config, options, given, _gpu(device), has_triton=has_triton)
    try:
        if options.runner == "fast" or not isinstance(config, ModelConfig):
            built = _fast(path, config, options, device, dtype)
        else:
            built = _reference(path, config, options, device, dtype)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"the engine does not fit into memory: {error}; bathyal engine plan says who gets what"
        ) from None
    except GridError as error:
        raise EngineError(
            f"the kernels do not fit this GPU: {error}; --kernels torch does without them"
        ) from None
    logger.info(
        "engine ready: weights in %.1f s, pools and decode steps in %.1f s",
        built.load_seconds,
        built.ready_seconds,
    )
    return built


class Source:
    """Where an engine's weights come from, and how to take others of the same shape.

    Attributes:
        path: folder of the checkpoint that is served.

    Args:
        path: as above.
        options: as the user gave them.
    """

    def __init__(self, path: Path, options: EngineConfig) -> None:
        self.path = path
        self._options = options

    def check(self, path: Path) -> None:
        """Look at a checkpoint before anything is given up for it.

        Raises:
            EngineError: it cannot be served, or another shape than the one that is served.
        """
        old, new = read_config(self.path), read_config(path)
        if isinstance(new, Qwen3Config):
            QwenCheckpoint(path, new, torch.device("cpu"))
        elif problems := Checkpoint(path).problems():
            raise CheckpointError(path, problems)
        if type(old) is not type(new):
            raise EngineError(f"{path}: expected the architecture that is served, got another")
        differing = [
            f"{item.name}: expected {getattr(old, item.name)}, got {getattr(new, item.name)}"
            for item in dataclasses.fields(old)
            if getattr(old, item.name) != getattr(new, item.name)
        ]
        if differing:
            raise EngineError(f"{path}: not of the shape that is served: {'; '.join(differing)}")

    def rebuild(self, path: Path) -> Built:
        """Build another checkpoint; if that fails, the old one again, so that `path` stays.

        Whoever calls has let go of what was built before.
        """
        free_memory()
        try:
            built = build(path, self._options)
        except Exception:
            logger.exception("%s cannot be built; going back to %s", path, self.path)
            free_memory()
            return build(self.path, self._options)
        self.path = path
        return built


def resolve_here(path: Path, config: AnyConfig, options: EngineConfig) -> Resolved:
    """Fill in what is open by what this machine has.

    Raises:
        EngineError: the device asked for is not there, or the options do not fit the model.
    """
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    if options.device == "cuda" and gpu is None:
        raise EngineError("engine options: device: cuda asked for, but torch finds no NVIDIA GPU")
    weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    facts = facts_of(
        config,
        options,
        gpu=gpu,
        gpu_nbytes=None if gpu is None else torch.cuda.get_device_properties(0).total_memory,
        cores=usable_cores(),
        weight_bytes=weight_bytes,
    )
    return resolve(options, facts)


def salt_of(
    path: Path, config: AnyConfig, options: EngineConfig, forms: Forms, *how: object
) -> bytes:
    """Name everything beside the tokens that the state after them depends on.

    Args:
        path: folder of the checkpoint.
        config: of the model.
        options: with nothing left open.
        forms: of cached values.
        how: what else tells how state is computed.
    """
    if isinstance(config, Qwen3Config):
        weights = QwenCheckpoint(path, config, torch.device("cpu")).fingerprint()
        layout = repr((options.block_size, options.dtype)).encode()
    else:
        weights = Checkpoint(path).fingerprint()
        layout = layout_fingerprint(config, options.block_size, str(options.dtype), forms)
    return weights + layout + repr(how).encode()


def settle() -> None:
    """Have the garbage collector pass over what there is now, which stays.

    A loaded engine is some hundred thousand objects; going through them takes as long as several
    steps, and every so many new objects it would happen in the middle of one.
    """
    gc.unfreeze()  # what was kept for an engine that is gone
    gc.collect()
    gc.freeze()


def free_memory() -> None:
    """Give back what objects that are gone have held."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _gpu(device: torch.device) -> Gpu | None:
    """What refusals look at; None on the CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, (found.major, found.minor), found.total_memory)


def _reference(
    path: Path,
    config: ModelConfig,
    options: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Built:
    begin = time.perf_counter()
    model = load_model(path, device=device, dtype=dtype)
    replay = Replay(model.tail, options.prefill, model.tail_problems)
    loaded = time.perf_counter()
    pool = _pool(config, options, device, dtype, None)
    assert isinstance(pool, KVPool)
    runner = ModelRunner(model, pool, device)
    salt = salt_of(path, config, options, Forms(), "reference", model.round_trips)
    ready = time.perf_counter()
    return Built(config, runner, options, salt, replay, loaded - begin, ready - loaded)


def _fast(
    path: Path,
    config: AnyConfig,
    options: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Built:
    if isinstance(config, Qwen3Config):
        tail = None
        replay = Replay(None, options.prefill, ("every layer of this model processes every row",))
    else:
        tail = tail_of(config)
        replay = Replay(tail, options.prefill, tuple(tail_problems(config)))
    assert options.max_model_len is not None
    paging = paging_of(config, options, dtype.itemsize)
    begin = time.perf_counter()
    drafting = drafting_of(options)
    model = _load_fast(path, config, options, device, dtype, paging)
    speculator = None
    if drafting != "off":
        assert isinstance(model, FastModel)
        speculator = Speculator(model, load_drafter(path, model, drafting))
    loaded = time.perf_counter()
    if options.expert_prefetch:
        model.use_prefetch()
    recorder = None
    if options.record_routing is not None:
        per_row = config.num_experts_per_tok
        recorder = RoutingRecorder(options.record_routing, model.gates, per_row)
    forms = model.forms if isinstance(model, FastModel) else Forms()
    runner = FastRunner(
        model,
        _pool(config, options, device, dtype, forms),
        device,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        captures=bool(options.graphs),
        looks_ahead=options.lookahead,
        tail=tail,
        tail_buckets=TAIL_BUCKETS if options.tail_graphs else (),
        prompt_buckets=PROMPT_BUCKETS if _captures_prompts(model, options, paging) else (),
        captured_rows=paging.most_captured_rows,
        recorder=recorder,
        speculator=speculator,
    )
    _log_paging(paging, runner)
    if options.kernels == "triton" or options.tail_graphs:
        runner.warm_up(options.resolve_max_batched_tokens())
    logger.info(
        "kernels made ready: %d compiled, %d from the cache",
        runner.compiles.compiled,
        runner.compiles.loaded,
    )
    _log_captured(runner)
    rounds = model.round_trips if isinstance(model, FastModel) else False
    salt = salt_of(path, config, options, forms, "fast", options.kernels, rounds, drafting)
    ready = time.perf_counter()
    return Built(config, runner, options, salt, replay, loaded - begin, ready - loaded)


def _captures_prompts(model: FastModel | Qwen3Model, options: EngineConfig, paging: Paging) -> bool:
    """Whether short passes over prompts are captured where decode steps are.

    Not of paged experts, whose passes the host cuts into waves, and not of the twins in torch, which
    are there to compare decode steps with.
    """
    fused = isinstance(model, FastModel) and options.kernels == "triton"
    return bool(options.graphs) and fused and not paging.is_paged


def _load_fast(
    path: Path,
    config: AnyConfig,
    options: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    paging: Paging,
) -> FastModel | Qwen3Model:
    assert options.max_model_len is not None
    load = load_qwen3 if isinstance(config, Qwen3Config) else load_fast_model
    return load(
        path,
        kernels="triton" if options.kernels == "triton" else "torch",
        device=device,
        dtype=dtype,
        max_model_len=options.max_model_len + draft_tokens(config, drafting_of(options)),
        slots=paging.slots,
        host_bytes=paging.host_bytes,
        pins=paging.pins,
    )


def _log_captured(runner: FastRunner) -> None:
    log_buckets("decode step", runner.graphs.captured)
    if runner.speculation is not None:
        logger.info("drafts of %d tokens", runner.num_drafts)
        log_buckets("speculative step", runner.speculation.graphs.captured)
    for what, graphs in (("tail", runner.prompts.tails), ("prompt", runner.prompts.graphs)):
        if graphs is not None:
            logger.info("%ss: buffers of %.1f MB", what, graphs.buffer_bytes / 1e6)
            log_buckets(what, graphs.captured)


def log_buckets(what: str, captured: Sequence[Captured]) -> None:
    """Log what each bucket took, and once for all that agree which operations run fused in them.

    Args:
        what: the noun for one of them.
        captured: buckets.
    """
    alike: dict[frozenset[str], list[str]] = {}
    for bucket in captured:
        logger.info(
            "%s of %d rows: %.2f s, %.1f MB",
            what,
            bucket.bucket,
            bucket.seconds,
            bucket.pool_bytes / 1e6,
        )
        alike.setdefault(bucket.kernels, []).append(str(bucket.bucket))
    for kernels, rows in alike.items():
        fused = ", ".join(sorted(kernels)) or "none"
        logger.info("%s of %s rows: fused operations: %s", what, ", ".join(rows), fused)


def _log_paging(paging: Paging, runner: FastRunner) -> None:
    if not paging.is_paged:
        return
    held, rows = runner.paged, paging.most_captured_rows
    logger.info(
        "experts of %d layers are paged: %.1f GB in slots, %d experts stay there; %.1f GB on the host"
        " (pinned in %.1f s)%s; decode steps of up to %d requests are captured",
        len(held),
        sum(paged.nbytes for paged in held) / 1e9,
        sum(paged.num_pins for paged in held),
        sum(paged.host_nbytes for paged in held) / 1e9,
        sum(paged.pin_seconds for paged in held),
        ", the rest in files" if paging.uses_disk else "",
        rows or 0,
    )


def _pool(
    config: AnyConfig,
    options: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    forms: Forms | None,
) -> KVPool | QwenPool:
    """Pools of a fast model whose cached values have some forms, or (None) of the reference."""
    assert options.num_blocks is not None
    if isinstance(config, Qwen3Config):
        return QwenPool(
            config,
            num_blocks=options.num_blocks + 1,  # and the dummy
            block_size=options.block_size,
            device=device,
            dtype=dtype,
        )
    try:
        return KVPool(
            config,
            num_blocks=options.num_blocks + 1,  # and the dummy
            block_size=options.block_size,
            num_slots=options.resolve_num_slots(),
            device=device,
            dtype=dtype,
            forms=forms,
            ring_history=forms is not None,
            drafting=drafting_of(options),
        )
    except ValueError as error:
        raise EngineError(f"engine options: {error}") from error
