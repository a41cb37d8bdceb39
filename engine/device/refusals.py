"""Why an engine cannot be built as asked: all reasons at once, each with what was seen and accepted.

Checked before weights are loaded, which takes a minute, and never in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.api import EngineError
from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.expert_paging import paging_of, problems
from engine.memory import container_memory, plan_memory
from engine.options import DECODE_BUCKETS, EngineConfig
from engine.plan.replay import tail_problems
from engine.routing_trace import write_problem
from engine.speculation import drafting_of, low_taps, speculation_problems

#: Oldest GPUs whose units know FP8, which the kernels convert from.
LEAST_CAPABILITY = (8, 9)
#: Kernels hold one head of a key in a tile, whose sides are powers of two.
TILED = ("head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What refusals look at.

    Args:
        name: of the GPU.
        capability: compute capability.
        nbytes: of its memory.
    """

    name: str
    capability: tuple[int, int]
    nbytes: int


class Refusals:
    """Collects reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def check(self, ok: bool, what: str, *, seen: object, accepted: object) -> None:
        """Note a reason unless all is well."""
        if not ok:
            self.reasons.append(f"{what}: expected {accepted}, got {seen}")

    def raise_all(self, what: str) -> None:
        """Raise what was collected.

        Args:
            what: that cannot be built.

        Raises:
            EngineError: naming every reason, if there is any.
        """
        if self.reasons:
            raise EngineError(f"{what} cannot be built: " + "; ".join(self.reasons))


def check_engine(
    config: AnyConfig,
    options: EngineConfig,
    given: EngineConfig,
    gpu: Gpu | None,
    *,
    has_triton: bool,
) -> None:
    """Refuse what cannot be served: at start, before weights are loaded, and by `bathyal doctor`.

    Args:
        config: of the model.
        options: with nothing left open.
        given: as the user gave them: what he asks for must not be without effect.
        gpu: that will run it; None on the CPU.
        has_triton: whether Triton is installed.

    Raises:
        EngineError: naming every reason.
    """
    if options.runner == "fast" or not isinstance(config, ModelConfig):
        check_fast(config, options, gpu, has_triton=has_triton, buckets=DECODE_BUCKETS)
    else:
        check_reference(config, options, given, gpu, has_triton=has_triton)


def check_reference(
    config: ModelConfig,
    options: EngineConfig,
    given: EngineConfig,
    gpu: Gpu | None,
    *,
    has_triton: bool,
) -> None:
    """Refuse what the reference runner cannot do.

    Args:
        config: of the model.
        options: with nothing left open.
        given: as in check_engine.
        gpu: as in check_engine.
        has_triton: as in check_engine.

    Raises:
        EngineError: naming every reason.
    """
    found = Refusals()
    for p in (*problems(config, options, 4, None), *speculation_problems(config, options)):
        found.check(False, p.what, seen=p.seen, accepted=p.accepted)
    if options.record_routing is not None:
        found.check(False, "runner", seen="reference beside record_routing", accepted="fast")
    if options.tail_graphs:
        found.check(False, "runner", seen="reference beside tail_graphs", accepted="fast")
    if given.graphs:
        found.check(False, "runner", seen="reference beside graphs on", accepted="fast")
    if given.kernels == "triton":
        found.check(False, "runner", seen="reference beside kernels triton", accepted="fast")
    _check_machine(found, config, given, gpu, has_triton=has_triton)
    found.raise_all("the reference runner")


def check_fast(
    config: AnyConfig,
    options: EngineConfig,
    gpu: Gpu | None,
    *,
    has_triton: bool,
    buckets: Sequence[int],
) -> None:
    """Refuse what the fast runner cannot serve.

    Args:
        config: of the model.
        options: with nothing left open.
        gpu: None on the CPU.
        has_triton: whether Triton is installed.
        buckets: row counts of decode steps.

    Raises:
        EngineError: naming every reason.
    """
    found = Refusals()
    fast = options.runner == "fast"
    found.check(fast, "runner", seen=options.runner, accepted="fast for this architecture")
    _check_machine(found, config, options, gpu, has_triton=has_triton)
    if gpu is not None:
        _check_memory(found, config, options, gpu)
    compress = config.compress_ratios if isinstance(config, ModelConfig) else ()
    ratios = sorted({ratio for ratio in compress if ratio})
    wrong = [ratio for ratio in ratios if options.block_size % ratio]
    found.check(
        not wrong, "block_size", seen=options.block_size, accepted=f"a multiple of {ratios}"
    )
    for p in problems(config, options, options.itemsize, container_memory()):
        found.check(False, p.what, seen=p.seen, accepted=p.accepted)
    for p in speculation_problems(config, options):
        found.check(False, p.what, seen=p.seen, accepted=p.accepted)
    if options.record_routing is not None:
        _check_recording(found, options, options.record_routing)
    found.check(bool(buckets), "decode buckets", seen="none", accepted="at least one batch size")
    found.raise_all("the fast runner")


def _check_machine(
    found: Refusals,
    config: AnyConfig,
    options: EngineConfig,
    gpu: Gpu | None,
    *,
    has_triton: bool,
) -> None:
    """Note what the machine or the model lacks for kernels and graphs, whatever runner was to have them."""
    fused = options.kernels == "triton"
    if fused:
        found.check(has_triton, "kernels triton", seen="none", accepted="Triton installed")
        found.check(gpu is not None, "kernels triton", seen="the CPU", accepted="an NVIDIA GPU")
        for name in TILED if isinstance(config, ModelConfig) else ("head_dim",):
            side = getattr(config, name)
            power = side & (side - 1) == 0
            found.check(power, f"config.json: {name}", seen=side, accepted="a power of two")
    if options.graphs:
        found.check(gpu is not None, "graphs on", seen="the CPU", accepted="an NVIDIA GPU")
    if options.tail_graphs:
        _check_tails(found, config, options, gpu)
    if gpu is not None and fused:
        seen = f"{gpu.name} with {'.'.join(map(str, gpu.capability))}"
        least = ".".join(map(str, LEAST_CAPABILITY))
        enough = gpu.capability >= LEAST_CAPABILITY
        found.check(
            enough, "compute capability", seen=seen, accepted=f"{least} or above for FP8 kernels"
        )


def _check_recording(found: Refusals, options: EngineConfig, path: Path) -> None:
    """Note why routing cannot be recorded to a file."""
    seen = write_problem(path)
    accepted = "a regular file, or a new one"
    found.check(seen is None, f"record_routing {path}", seen=seen, accepted=accepted)
    for name in ("graphs", "tail_graphs"):
        is_off = not getattr(options, name)
        found.check(is_off, name, seen="on beside record_routing", accepted="off")


def _check_memory(found: Refusals, config: AnyConfig, options: EngineConfig, gpu: Gpu) -> None:
    """Note that what the engine holds all the time exceeds the GPU.

    That is a lower bound, weights and pools, so nothing is refused that would have fitted; what steps
    and prompts take beside it `bathyal engine plan` counts or estimates.
    """
    plan = plan_memory(config, options, itemsize=options.itemsize, budget=None, packed=True)
    held = sum(item.nbytes for item in plan.items if item.owner in ("weights", "slots", "blocks"))
    paging = paging_of(config, options, options.itemsize)
    away = sum(max(0, paging.experts.count - k) for k in paging.slots.values())
    held -= away * paging.experts.nbytes
    pools, less = f"{options.num_blocks} blocks", "num_blocks"
    if isinstance(config, ModelConfig):  # others keep nothing in slots
        pools += f", {options.resolve_num_slots()} slots of requests and snapshots"
        less += ", max_num_seqs, max_snapshots"
    found.check(
        held <= gpu.nbytes,
        "GPU memory",
        seen=f"{held:,} bytes of weights and pools ({pools})",
        accepted=f"at most {gpu.nbytes:,} bytes, what {gpu.name} has; less {less} or expert_slots"
        " need less",
    )


def _check_tails(
    found: Refusals, config: AnyConfig, options: EngineConfig, gpu: Gpu | None
) -> None:
    """Note why a prompt's tail cannot be captured."""
    found.check(gpu is not None, "tail_graphs on", seen="the CPU", accepted="an NVIDIA GPU")
    why = ["every layer of this model processes every row"]
    if isinstance(config, ModelConfig):
        why = list(tail_problems(config))
    accepted = "a model whose late layers can leave rows out"
    found.check(not why, "tail_graphs on", seen="; ".join(why), accepted=accepted)
    # Which experts a pass of a hundred rows needs is read on the host.
    paged = paging_of(config, options, options.itemsize).is_paged
    found.check(not paged, "tail_graphs on", seen="paged experts", accepted="all experts resident")
    if drafting_of(options) != "off" and (low := low_taps(config)):
        seen = f"speculation from layers {low}"
        found.check(False, "tail_graphs on", seen=seen, accepted="drafters that read the tail only")
