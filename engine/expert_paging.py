"""Which layers' experts are paged, with how many slots: what the options say, and what is wrong.

Torch-free: read by the refusals at start, the memory plan and the resolver. The placing itself is
engine.model.placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.options import EngineConfig
from engine.qwen3_config import Qwen3Config

#: Bytes of the unit that expert_host_gb counts in.
GB = 10**9
#: Most bytes of one of the two buffers that experts of long prompts pass through.
BUFFER_BYTES = 300_000_000
#: Tensors of an expert begin at multiples of this many bytes (engine.model.expert_layout).
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that cannot be served.

    Args:
        what: the option.
        seen: its value.
        accepted: what it may be.
    """

    what: str
    seen: object
    accepted: str


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a model.

    Args:
        layers: L.
        count: E, of each layer.
        per_row: experts a row is routed to.
        nbytes: of one expert.
    """

    layers: int
    count: int
    per_row: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Paging:
    """What is paged.

    Args:
        slots: layer -> K of each paged layer; the others are wholly on the device.
        experts: of the model.
        host_bytes: most host memory of all of them; None for no limit.
    """

    slots: dict[int, int]
    experts: Experts
    host_bytes: int | None

    @property
    def host_nbytes(self) -> int:
        """Bytes of them that the host holds."""
        return len(self.slots) * self.host_rows * self.experts.nbytes

    @property
    def host_rows(self) -> int:
        """Experts of each paged layer that the host holds; E unless the budget is smaller."""
        if self.host_bytes is None or not self.slots:
            return self.experts.count
        return min(self.experts.count, self.host_bytes // (len(self.slots) * self.experts.nbytes))

    @property
    def uses_disk(self) -> bool:
        """Whether some experts are in the checkpoint's files alone."""
        return self.host_rows < self.experts.count

    @property
    def most_captured_rows(self) -> int | None:
        """Rows of the largest decode step that can be captured; None where nothing is paged."""
        if not self.slots:
            return None
        return 0 if self.uses_disk else min(self.slots.values()) // self.experts.per_row


def experts_of(config: AnyConfig, itemsize: int) -> Experts:
    """Count a model's experts and the bytes of one, as official checkpoints store them.

    Args:
        config: of the model.
        itemsize: bytes of an element that is not packed.
    """
    if isinstance(config, Qwen3Config):
        layers, count = config.num_hidden_layers, config.num_experts
    else:
        layers, count = len(config.layers), config.n_routed_experts
    d, inner = config.hidden_size, config.moe_intermediate_size
    shapes = ((2 * inner, d), (d, inner))
    nbytes = sum(_aligned(size) for shape in shapes for size in _sizes(config, *shape, itemsize))
    return Experts(layers, count, config.num_experts_per_tok, nbytes)


def _sizes(config: AnyConfig, rows: int, columns: int, itemsize: int) -> Iterator[int]:
    """Bytes of each tensor of a matrix."""
    size = rows * columns
    if isinstance(config, ModelConfig):
        if config.weight_block_size is None:
            yield size * itemsize
        else:
            yield from (size // 2, size // 32)
        return
    how = config.quantisation
    if how is None:
        yield size * itemsize
    elif how.method.startswith("int4"):
        yield from (size // 2, 4 * size // how.group, size // how.group)
    elif how.method == "nvfp4":
        yield from (size // 2, size // 16, 4 * rows)
    elif how.method == "fp8_block":
        yield from (size, 4 * -(-rows // how.group) * -(-columns // how.group))
    else:
        yield from (size, 4 * rows)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def paging_of(config: AnyConfig, options: EngineConfig, itemsize: int) -> Paging:
    """Read what the options say; what is wrong with them `problems` says.

    Args:
        config: of the model.
        options: the user's, or resolved.
        itemsize: bytes of an element that is not packed.
    """
    experts = experts_of(config, itemsize)
    if options.expert_slots_file is not None:
        numbers = _read(options.expert_slots_file)
        slots = dict(enumerate(numbers if isinstance(numbers, list) else []))
    elif options.expert_slots is not None:
        slots = dict.fromkeys(range(options.resident_layers, experts.layers), options.expert_slots)
    else:
        slots = {}
    # A layer with a slot for every expert needs no store.
    slots = {layer: k for layer, k in slots.items() if k != experts.count}
    host = options.expert_host_gb
    return Paging(slots, experts, None if host is None else host * GB)


def problems(
    config: AnyConfig, options: EngineConfig, itemsize: int, host_limit: int | None
) -> Iterator[Problem]:
    """Say what of the options on paging cannot be served.

    Args:
        config: of the model.
        options: with nothing left open.
        itemsize: as in paging_of.
        host_limit: bytes of memory that this process may use; None where nobody says.
    """
    experts = experts_of(config, itemsize)
    e, k = experts.count, experts.per_row
    single, file = options.expert_slots, options.expert_slots_file
    if single is None and file is None:
        for name in ("resident_layers", "expert_host_gb", "expert_prefetch"):
            value = getattr(options, name)
            if value:
                yield Problem(name, value, "nothing without expert_slots or expert_slots_file")
        return
    if single is not None and file is not None:
        yield Problem("expert_slots", f"{single} beside {file}", "one of both")
    accepted = f"{k} (experts a token is routed to) to {e}"
    if single is not None and not k <= single <= e:
        yield Problem("expert_slots", single, accepted)
    if options.resident_layers > experts.layers:
        yield Problem("resident_layers", options.resident_layers, f"at most {experts.layers}")
    if file is not None:
        numbers = _read(file)
        if isinstance(numbers, str):
            yield Problem(f"expert_slots_file {file}", numbers, "a whole number a line")
            return
        if len(numbers) != experts.layers:
            wanted = f"one for each of {experts.layers} layers"
            yield Problem(f"expert_slots_file {file}", f"{len(numbers)} numbers", wanted)
        for layer, number in enumerate(numbers):
            if not k <= number <= e:
                yield Problem(f"expert_slots_file {file}, layer {layer}", number, accepted)
    if options.runner == "reference":
        yield Problem("runner", "reference beside paged experts", "fast")
    found = paging_of(config, options, itemsize)
    if problem := host_gb_problem(found, options, host_limit):
        yield problem
    if options.expert_prefetch and found.slots and found.uses_disk:
        yield Problem(
            "expert_prefetch",
            "on beside experts in files",
            "off: what a step reads from files is decided on the host",
        )
    if options.graphs and found.slots and found.uses_disk:
        yield Problem(
            "graphs",
            "on beside experts in files",
            "off: which experts a step reads from files is decided on the host",
        )


def host_gb_problem(found: Paging, options: EngineConfig, host_limit: int | None) -> Problem | None:
    """Say what is wrong with the host's share, if anything is; arguments as in problems."""
    experts, most = found.experts, max(found.slots.values(), default=0)
    if found.slots and found.host_rows < max(most, 2):
        least = -(-max(most, 2) * len(found.slots) * experts.nbytes // GB)
        return Problem(
            "expert_host_gb",
            options.expert_host_gb,
            f"{least} or above, room for {most} experts of {experts.nbytes:,} bytes in each of"
            f" {len(found.slots)} layers",
        )
    if host_limit is not None and found.host_nbytes > host_limit:
        return Problem(
            "expert_host_gb",
            f"{options.expert_host_gb or 'no limit'}, which takes {found.host_nbytes:,} bytes",
            f"less than the {host_limit:,} bytes this process may use; more slots or resident"
            " layers need less",
        )
    return None


def buffer_experts(count: int, nbytes: int) -> int:
    """Experts that one of the two buffers holds (engine.model.expert_stream).

    Args:
        count: experts of a layer.
        nbytes: of one.
    """
    return max(1, min(count, BUFFER_BYTES // nbytes))


def write_slots(path: Path, slots: tuple[int, ...]) -> None:
    """Write what `expert_slots_file` reads: one number a line, a layer each."""
    path.write_text("".join(f"{k}\n" for k in slots))


def _read(path: Path) -> list[int] | str:
    """Numbers of a file; words where it has others."""
    try:
        text = path.read_text()
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    found = []
    for number, line in enumerate(text.split(), 1):
        if not line.isdecimal():
            return f"{line[:20]!r} as number {number}"
        found.append(int(line))
    return found
