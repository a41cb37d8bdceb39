"""Which layers' experts are paged, with how many slots: what the options say, and what is wrong.

Torch-free: read by the refusals at start, the memory plan and the resolver. The placing itself is
engine.model.placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.architectures import AnyConfig
from engine.config import ModelConfig
from engine.options import EngineConfig, shown
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
        pins: layer -> experts that lie in slots for ever and nowhere else; none where it has no entry.
    """

    slots: dict[int, int]
    experts: Experts
    host_bytes: int | None
    pins: dict[int, tuple[int, ...]]

    @property
    def is_paged(self) -> bool:
        """Whether some layer's experts are not all on the device.

        The one rule, whoever asks: options that give every expert a slot page nothing.
        """
        return bool(self.slots)

    @property
    def rooms(self) -> dict[int, int]:
        """Slots of each paged layer that pinned experts leave to the others."""
        return {layer: k - len(self.pins.get(layer, ())) for layer, k in self.slots.items()}

    @property
    def _needs(self) -> dict[int, int]:
        """Experts of each paged layer that are not pinned."""
        e = self.experts.count
        return {layer: e - len(self.pins.get(layer, ())) for layer in self.slots}

    @property
    def host_nbytes(self) -> int:
        """Bytes of them that the host holds."""
        return sum(self.host_rows.values()) * self.experts.nbytes

    @property
    def host_rows(self) -> dict[int, int]:
        """Experts of each paged layer that the host holds; all unpinned unless the budget is smaller."""
        return host_rows(self.host_bytes, self.experts.nbytes, self._needs)

    @property
    def uses_disk(self) -> bool:
        """Whether some experts are in the checkpoint's files alone."""
        return self.host_rows != self._needs

    @property
    def disk_nbytes(self) -> int:
        """Bytes of them that are in the checkpoint's files alone."""
        return sum(self._needs.values()) * self.experts.nbytes - self.host_nbytes

    @property
    def uses_stream(self) -> bool:
        """Whether experts of long prompts pass through buffers: those of layers that need no file."""
        rows, needs = self.host_rows, self._needs
        return any(rows[layer] == need for layer, need in needs.items())

    @property
    def most_captured_rows(self) -> int | None:
        """Rows of the largest decode step that can be captured; None where nothing is paged."""
        if not self.is_paged:
            return None
        return 0 if self.uses_disk else min(self.rooms.values()) // self.experts.per_row


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """What `expert_slots_file` says of one layer.

    Args:
        slots: K.
        pins: experts that lie in slots for ever.
    """

    slots: int
    pins: tuple[int, ...] = ()


def host_rows(host_bytes: int | None, nbytes: int, needs: Mapping[int, int]) -> dict[int, int]:
    """Share host memory out among paged layers: all they need, or equal parts.

    Args:
        host_bytes: for all of them; None for no limit.
        nbytes: of an expert.
        needs: layer -> experts that the host is to hold.

    Returns:
        layer -> experts that it holds.
    """
    if host_bytes is None or sum(needs.values()) * nbytes <= host_bytes:
        return dict(needs)
    each = host_bytes // (len(needs) * nbytes)
    return {layer: min(need, each) for layer, need in needs.items()}


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
    pins: dict[int, tuple[int, ...]] = {}
    if options.expert_slots_file is not None:
        read = _read(options.expert_slots_file)
        lines = read if isinstance(read, list) else []
        slots = {layer: line.slots for layer, line in enumerate(lines)}
        pins = {layer: line.pins for layer, line in enumerate(lines) if line.pins}
    elif options.expert_slots is not None:
        slots = dict.fromkeys(range(options.resident_layers, experts.layers), options.expert_slots)
    else:
        slots = {}
    # A layer with a slot for every expert needs no store.
    slots = {layer: k for layer, k in slots.items() if k != experts.count}
    pins = {layer: some for layer, some in pins.items() if layer in slots}
    host = options.expert_host_gb
    return Paging(slots, experts, None if host is None else host * GB, pins)


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
                accepted = "nothing without expert_slots or expert_slots_file"
                yield Problem(name, shown(value), accepted)
        return
    if single is not None and file is not None:
        yield Problem("expert_slots", f"{single} beside {file}", "one of both")
    accepted = f"{k} (experts a token is routed to) to {e}"
    if single is not None and not k <= single <= e:
        yield Problem("expert_slots", single, accepted)
    if options.resident_layers > experts.layers:
        yield Problem("resident_layers", options.resident_layers, f"at most {experts.layers}")
    unusable = False
    if file is not None:
        lines = _read(file)
        if isinstance(lines, Problem):
            yield lines
            return
        if len(lines) != experts.layers:
            wanted = f"one for each of {experts.layers} layers"
            yield Problem(f"expert_slots_file {file}", f"{len(lines)} numbers", wanted)
        for layer, line in enumerate(lines):
            where = f"expert_slots_file {file}, layer {layer}"
            if not k <= line.slots <= e:
                yield Problem(where, line.slots, accepted)
            elif line.pins:
                wrong = list(_pin_problems(f"{where}, pinned experts", line, experts))
                unusable = unusable or bool(wrong)
                yield from wrong
    found = paging_of(config, options, itemsize)
    if options.runner == "reference" and found.is_paged:
        yield Problem("runner", "reference beside paged experts", "fast")
    if unusable:  # what the host is to hold is not known
        return
    if problem := host_gb_problem(found, options.expert_host_gb, host_limit):
        yield problem
    if options.expert_prefetch and found.uses_disk:
        yield Problem(
            "expert_prefetch",
            "on beside experts in files",
            "off: what a step reads from files is decided on the host",
        )
    if options.graphs and found.uses_disk:
        yield Problem(
            "graphs",
            "on beside experts in files",
            "off: which experts a step reads from files is decided on the host",
        )


def _pin_problems(where: str, line: LayerSlots, experts: Experts) -> Iterator[Problem]:
    """Say what is wrong with a layer's pinned experts."""
    e, k = experts.count, experts.per_row
    unknown = sorted({expert for expert in line.pins if expert >= e})
    if unknown:
        yield Problem(where, _some(unknown), f"ids from 0 to {e - 1}")
    twice = sorted({expert for expert in line.pins if line.pins.count(expert) > 1})
    if twice:
        yield Problem(where, f"{_some(twice)} more than once", "each once")
    if line.slots == e:
        yield Problem(where, f"{len(line.pins)} of them", "none, since all lie on the device")
    elif len(line.pins) > line.slots - k:
        yield Problem(
            where,
            f"{len(line.pins)} for {line.slots} slots",
            f"at most {line.slots - k}: the {k} experts of a token that may be others need slots, too",
        )


def _some(ids: Sequence[int]) -> str:
    """Ids for a message."""
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def host_gb_problem(found: Paging, given: int | None, host_limit: int | None) -> Problem | None:
    """Say what is wrong with the host's share, if anything is.

    Args:
        found: what is paged.
        given: gigabytes of that share; None for no limit.
        host_limit: as in problems.
    """
    experts = found.experts
    # Of more slots than experts another line tells.
    rooms = {layer: min(room, experts.count) for layer, room in found.rooms.items()}
    most = max(rooms.values(), default=0)
    if any(rows < max(rooms[layer], 2) for layer, rows in found.host_rows.items()):
        least = -(-max(most, 2) * len(found.slots) * experts.nbytes // GB)
        return Problem(
            "expert_host_gb",
            given,
            f"{least} or above, room for {most} experts of {experts.nbytes:,} bytes in each of"
            f" {len(found.slots)} layers",
        )
    if host_limit is not None and found.host_nbytes > host_limit:
        return Problem(
            "expert_host_gb",
            f"{given or 'no limit'}, which takes {found.host_nbytes:,} bytes",
            f"less than the {host_limit:,} bytes this process may use; more slots, resident"
            " layers or pinned experts need less",
        )
    return None


def buffer_experts(count: int, nbytes: int) -> int:
    """Experts that one of the two buffers holds (engine.model.expert_stream).

    Args:
        count: experts of a layer.
        nbytes: of one.
    """
    return max(1, min(count, BUFFER_BYTES // nbytes))


def write_slots(path: Path, layers: Sequence[LayerSlots]) -> None:
    """Write what `expert_slots_file` reads.

    A line a layer: its slots, and behind a colon, if there are some, the experts that are pinned.
    """
    path.write_text("".join(f"{_line(layer)}\n" for layer in layers))


def _line(layer: LayerSlots) -> str:
    pins = " ".join(map(str, layer.pins))
    return f"{layer.slots}: {pins}" if pins else str(layer.slots)


def _read(path: Path) -> list[LayerSlots] | Problem:
    """Read a file of slots; says what is wrong with one that is none."""
    where, accepted = f"expert_slots_file {path}", "a whole number a line"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        return Problem(where, f"a file that cannot be read ({why})", accepted)
    found: list[LayerSlots] = []
    for line in text.splitlines():
        numbers, colon, pins = line.partition(":")
        for word in numbers.split():
            if not word.isdecimal():
                return Problem(where, f"{word[:20]!r} as number {len(found) + 1}", accepted)
            found.append(LayerSlots(int(word)))
        if colon:
            words = pins.split()
            if len(numbers.split()) != 1 or not all(word.isdecimal() for word in words):
                wanted = "slots of one layer, a colon and ids of pinned experts"
                return Problem(where, f"{line[:40]!r}", wanted)
            found[-1] = LayerSlots(found[-1].slots, tuple(map(int, words)))
    return found
