"""Models whose experts are paged, and routing of stated locality for them.

Weights are drawn from a seed, and random weights route at random, which no real traffic does. So
choices are injected: a *trace* says for each step and layer which experts a row gets. The router
still runs, and the slots count what they found, which is checked against the host's own count.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.device_step import BLOCK
from bench.geometries import QWEN, QWEN3_30B, geometry
from engine.device.kvpool import KVPool
from engine.device.qwen_pool import QwenPool
from engine.device.rows import build_rows
from engine.kernels.grouping import most_tiles, tile_pairs
from engine.kernels.ops import Implementation
from engine.kernels.paging import HITS, MISSES
from engine.kernels.router import Routing
from engine.kernels.rows import Rows
from engine.model.experts import PagedExperts
from engine.model.fast import FastModel
from engine.model.loading import random_fast_model
from engine.model.prefetch import Guess, Prefetch
from engine.model.qwen3 import Qwen3Model
from engine.model.qwen3_loading import random_qwen3
from engine.plan.residency import Residency
from engine.plan.step import Chunk
from engine.qwen3_config import Qwen3Config

#: Experts of each step, layer, row and place, int32.
Choices = np.ndarray[Any, np.dtype[np.int32]]
CONTEXT = 4096
#: Tokens that a sequence has before its first step.
START = 128
#: Where models are; a CPU can try everything but captured steps.
DEVICE = "cuda"


def reuse_trace(
    steps: int, experts: int, per_step: int, held: Sequence[int], hit: float, seed: int
) -> list[list[int]]:
    """Choices of one layer: distinct within a step, a share h of them from the K used last.

    As many choices as the share says are misses, at random places.

    Args:
        steps: how many.
        experts: E.
        per_step: choices of a step.
        held: the K experts that slots hold now, used longest ago first.
        hit: h.
        seed: of the draws.
    """
    draw = random.Random(seed)
    recent, slots = list(held), len(held)
    found = []
    places = range(steps * per_step)
    misses = set(draw.sample(places, round((1 - hit) * len(places))))
    for step in range(steps):
        known = set(recent)
        chosen: list[int] = []
        others = [e for e in range(experts) if e not in known]
        for place in range(step * per_step, (step + 1) * per_step):
            source = others if place in misses and others else recent
            expert = draw.choice(source)
            while expert in chosen:
                expert = draw.choice(source if len(set(source) - set(chosen)) else recent)
            chosen.append(expert)
        found.append(chosen)
        for expert in chosen:
            if expert in known:
                recent.remove(expert)
            recent.append(expert)
        recent = recent[-slots:]
    return found


def zipf_trace(steps: int, experts: int, per_row: int, seed: int) -> list[list[int]]:
    """Choices of one layer and one row, drawn independently, the r-th expert with weight 1 / r."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, experts + 1)
    ranks = rng.permutation(experts)
    # the k largest of log weight + Gumbel noise are k draws without replacement
    keys = np.log(weights) + rng.gumbel(size=(steps, experts))
    return [ranks[line].tolist() for line in np.argsort(-keys, axis=1)[:, :per_row]]


def uniform_trace(steps: int, experts: int, per_row: int, seed: int) -> list[list[int]]:
    """Choices of one layer and one row, every expert as likely."""
    keys = np.random.default_rng(seed).random((steps, experts))
    found: list[list[int]] = np.argsort(keys, axis=1)[:, :per_row].tolist()
    return found


def guesses_of(trace: Choices, num_experts: int, accuracy: float) -> Choices:
    """A trace each of whose choices stays with a probability and is another expert else."""
    rng = np.random.default_rng(0)
    other = rng.integers(0, num_experts, trace.shape, dtype=np.int32)
    return np.where(rng.random(trace.shape) < accuracy, trace, other)


def packed(trace: Choices, num_experts: int) -> Tensor:
    """Routings of a trace as rows of numbers, so that a step fetches all of its own at once.

    Args:
        trace: int32 [steps, layers, rows, k].
        num_experts: E.

    Returns:
        int32 [steps, layers, n]: experts, order, tiles and number of tiles of `Routing`, each
        beginning at a multiple of four.
    """
    steps, layers, rows, k = trace.shape
    pairs, most, size = rows * k, most_tiles(rows, k, num_experts), tile_pairs(rows)
    flat = trace.reshape(-1, pairs)
    order = flat.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(flat, order, 1)
    place = np.broadcast_to(np.arange(pairs), ordered.shape)
    begins = np.ones_like(ordered, bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    opens = (place - first) % size == 0
    number = opens.cumsum(axis=1) - 1
    counts = np.zeros((len(flat), most), np.int32)
    line = np.broadcast_to(np.arange(len(flat))[:, None], ordered.shape)
    np.add.at(counts, (line, number), 1)
    tiles = np.zeros((len(flat), most, 3), np.int32)
    tiles[:, :, 0] = -1
    where = line[opens], number[opens]
    tiles[(*where, 0)], tiles[(*where, 1)] = ordered[opens], place[opens]
    tiles[:, :, 2] = counts
    used = number[:, -1:] + 1
    parts = [flat, order, tiles.reshape(len(flat), -1), used]
    found = np.concatenate([np.pad(p, ((0, 0), (0, -p.shape[1] % 4))) for p in parts], axis=1)
    return torch.from_numpy(found.astype(np.int32).reshape(steps, layers, -1))


class Injected:
    """Puts a trace in place of what routers chose for decode steps of its number of rows.

    Capturable: steps are counted on the device; behind the last one the trace begins anew.

    Args:
        model: whose operations are replaced.
        trace: int32 [steps, layers, rows, k].
        num_experts: E.
        guessed: as trace, what the layer before guesses of it; None for no prefetch.
    """

    def __init__(
        self,
        model: FastModel | Qwen3Model,
        trace: Choices,
        num_experts: int,
        guessed: Choices | None = None,
    ) -> None:
        device = model.gates[0].device
        self._packed = packed(trace, num_experts).to(device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        _, self._layers, rows, k = trace.shape
        self._shape, self._most = (rows, k), most_tiles(rows, k, num_experts)
        self._layer = 0
        self._now = self._packed[0]
        self._plain = model.ops
        self._model = model
        self._guessed = self._now_guessed = torch.empty(0)
        if guessed is not None:
            self._guessed = torch.from_numpy(guessed).to(device)
            self._now_guessed = self._guessed[0]
            guesses = [(e, self._guess(layer)) for layer, e in enumerate(model.experts)]
            model.prefetch = Prefetch(guesses, k)
        model.ops = dataclasses.replace(model.ops, route=self._route, norm_route=self._norm_route)

    def _given(self, routing: Routing) -> Routing:
        """The trace's choice for the layer that routes now, with the router's weights."""
        if self._layer == 0:
            self._now = self._packed.index_select(0, self.step)[0]
            if len(self._guessed):
                self._now_guessed = self._guessed.index_select(0, self.step)[0]
            self.step.add_(1).remainder_(len(self._packed))
        line, (rows, k) = self._now[self._layer], self._shape
        self._layer = (self._layer + 1) % self._layers
        pairs = rows * k
        sizes = [-(-size // 4) * 4 for size in (pairs, pairs, 3 * self._most, 1)]
        experts, order, tiles, used = line.split(sizes)  # type: ignore[no-untyped-call]
        return Routing(
            experts[:pairs].view(rows, k),
            routing.weights,
            order[:pairs],
            tiles[: 3 * self._most].view(-1, 3),
            used[:1],
        )

    def _route(
        self, x: Tensor, gate: Tensor, bias: Any, table: Any, rows: Rows, **kwargs: Any
    ) -> Routing:
        routing = self._plain.route(x, gate, bias, table, rows, **kwargs)
        return self._given(routing) if self._is_meant(rows) else routing

    def _is_meant(self, rows: Rows) -> bool:
        return rows.is_decode and rows.num_rows == self._shape[0]

    def _norm_route(
        self,
        h: Tensor,
        parts: Tensor,
        norm: Tensor,
        eps: float,
        gate: Tensor,
        rows: Rows,
        *,
        k: int,
    ) -> tuple[Tensor, Tensor, Routing]:
        h, x, routing = self._plain.norm_route(h, parts, norm, eps, gate, rows, k=k)
        return h, x, self._given(routing) if self._is_meant(rows) else routing

    def _guess(self, layer: int) -> Guess:
        return lambda _, rows: self._now_guessed[layer]

    def close(self) -> None:
        """Give the model its router back, and no prefetch."""
        self._model.ops = self._plain
        self._model.prefetch = None


def peaks() -> dict[str, float]:
    """Peak memory of both sides so far, in GB; pinned memory is the process's own."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return {"gpu_peak_gb": round(gpu / 1e9, 2), "host_peak_gb": round(host / 1e9, 2)}


def mark() -> torch.cuda.Event:
    """An event that notes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps that were timed.

    Args:
        ms: of each step.
        hits: experts found in slots, all layers and steps.
        misses: experts that were not.
        page_ins: misses of each step; empty where nothing is paged.
    """

    ms: list[float]
    hits: int
    misses: int
    page_ins: list[int]

    @property
    def hit_rate(self) -> float:
        """Share of routed experts that were found."""
        return self.hits / (self.hits + self.misses)

    @property
    def mean_ms(self) -> float:
        """Mean of a step; misses make steps unequal."""
        return sum(self.ms) / len(self.ms)


class PagedBench:
    """A model with some layers paged, and memory for a few sequences.

    Args:
        name: of the geometry.
        slots: layer -> K of each paged layer.
        rows: most sequences at once.
        fp8: Qwen's experts in FP8.
        pins: experts of each of Qwen's layers that stay in slots, spread evenly.
    """

    def __init__(
        self, name: str, slots: dict[int, int], rows: int, *, fp8: bool = False, pins: int = 0
    ) -> None:
        self.model: FastModel | Qwen3Model
        self.pool: KVPool | QwenPool
        per = CONTEXT // BLOCK
        kernels: Implementation = "triton" if DEVICE == "cuda" else "torch"
        if name == QWEN:
            config = Qwen3Config.from_dict(QWEN3_30B)
            self.layers, self.experts = config.num_hidden_layers, config.num_experts
            self.per_row, self.vocab = config.num_experts_per_tok, config.vocab_size
            stay = [i * self.experts // pins for i in range(pins)]
            self.model = random_qwen3(
                config, kernels=kernels, device=DEVICE, max_model_len=16384, slots=slots, fp8=fp8,
                pins=dict.fromkeys(slots, stay),
            )  # fmt: skip
            self.pool = QwenPool(
                config, num_blocks=rows * per + 64, block_size=BLOCK, device=DEVICE,
                dtype=torch.bfloat16,
            )  # fmt: skip
        else:
            shape = geometry(name)
            self.layers, self.experts = shape.num_hidden_layers, shape.n_routed_experts
            self.per_row, self.vocab = shape.num_experts_per_tok, shape.vocab_size
            self.model = random_fast_model(
                shape, kernels=kernels, device=DEVICE, max_model_len=16384, slots=slots
            )
            self.pool = KVPool(
                shape, num_blocks=rows * per + 64, block_size=BLOCK, num_slots=rows + 1,
                device=DEVICE, dtype=torch.bfloat16, ring_history=True,
                forms=self.model.forms,
            )  # fmt: skip

    @property
    def paged(self) -> list[PagedExperts]:
        """Experts of the paged layers."""
        return [e for e in self.model.experts if isinstance(e, PagedExperts)]

    def use_slots(self, count: int) -> None:
        """Give every paged layer another number of slots over the same store; of Qwen's layers."""
        assert isinstance(self.model, Qwen3Model)
        self.model.layers = tuple(
            dataclasses.replace(layer, experts=layer.experts.with_slots(count))
            if isinstance(layer.experts, PagedExperts)
            else layer
            for layer in self.model.layers
        )

    def rows(self, batch: int) -> Rows:
        """Decode rows at position START."""
        per = CONTEXT // BLOCK
        chunks = [
            Chunk(
                str(i), i + 1, START, (11 + i,), tuple(range(1 + i * per, 1 + (i + 1) * per)), True
            )
            for i in range(batch)
        ]
        rows, _ = build_rows(chunks, block_size=BLOCK, device=DEVICE)
        return dataclasses.replace(rows, max_end=CONTEXT, spans=())

    def middle(self, warm: int, steps: int) -> int:
        """Tokens that a sequence of `rows` has in the middle of steps that are timed."""
        return START + warm + steps // 2

    def counts(self) -> tuple[int, int]:
        """Hits and misses of all paged layers so far."""
        totals = [p.state.counters.tolist() for p in self.paged]
        return sum(t[HITS] for t in totals), sum(t[MISSES] for t in totals)

    def trace(self, kind: str, hit: float, steps: int, batch: int) -> Choices:
        """Choices int32 [steps, layers, rows, k]: "reuse", "zipf" or "uniform"."""
        k, lines = self.per_row, []
        for layer, experts in enumerate(self.model.experts):
            if kind == "reuse":
                held = list(range(self.experts))
                if isinstance(experts, PagedExperts):
                    table = experts.read_residency()
                    order = sorted(range(table.num_slots), key=lambda s: (table.last_use[s], s))
                    held = [table.slot_expert[slot] for slot in order]
                lines.append(reuse_trace(steps, self.experts, k * batch, held, hit, layer))
                continue
            draw = zipf_trace if kind == "zipf" else uniform_trace
            each = [draw(steps, self.experts, k, 1000 * layer + b) for b in range(batch)]
            lines.append([functools.reduce(operator.iadd, s, []) for s in zip(*each, strict=True)])
        array = np.array(lines, np.int32).reshape(self.layers, steps, batch, k)
        return np.ascontiguousarray(array.transpose(1, 0, 2, 3))

    def time_steps(
        self,
        batch: int,
        trace: Choices | None,
        warm: int,
        steps: int,
        accuracy: float | None = None,
    ) -> Timed:
        """Time captured decode steps after a warm-up.

        Args:
            batch: rows.
            trace: what they are routed to; None for what the model's own routers say.
            warm: steps before.
            steps: to be timed.
            accuracy: share of choices that are guessed right by a prefetch; None for none.

        Raises:
            RuntimeError: device and host do not count the same misses.
        """
        rows = self.rows(batch)
        injected = guessed = None
        if trace is not None:
            if accuracy is not None:
                guessed = guesses_of(trace, self.experts, accuracy)
            injected = Injected(self.model, trace, self.experts, guessed)

        def step() -> None:
            logits = self.model.decode(rows, self.pool)  # type: ignore[arg-type]
            rows.ids.copy_(logits.argmax(-1))
            rows.positions.add_(1)
            rows.starts.add_(1)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        if injected is not None:
            injected.step.zero_()
        for _ in range(warm):
            graph.replay()
        torch.cuda.synchronize()
        before, tables = self.counts(), [p.read_residency() for p in self.paged]
        marks = [mark() for _ in range(steps + 1)]
        marks[0].record()
        for after in marks[1:]:
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        if injected is not None:
            injected.close()
        hits, misses = (b - a for a, b in zip(before, self.counts(), strict=True))
        page_ins = self._page_ins(tables, trace, guessed, slice(warm, warm + steps))
        if page_ins and sum(page_ins) != misses:
            raise RuntimeError(f"the device counted {misses} misses, the host {sum(page_ins)}")
        return Timed(
            [a.elapsed_time(b) for a, b in itertools.pairwise(marks)],
            hits,
            misses,
            page_ins,
        )

    def _page_ins(
        self,
        tables: list[Residency],
        trace: Choices | None,
        guessed: Choices | None,
        steps: slice,
    ) -> list[int]:
        """What each step misses by the host's tables; resident layers come first."""
        if trace is None or not tables:
            return []
        asked = trace[steps].reshape(-1, self.layers, trace[0, 0].size).tolist()
        ahead = None if guessed is None else guessed[steps].reshape(len(asked), self.layers, -1)
        found, first = [0] * len(asked), self.layers - len(tables)
        for number, table in enumerate(tables):
            layer = first + number
            for at in range(len(asked)):
                if ahead is not None and layer:
                    table.bring_ahead(ahead[at, layer].tolist())
                found[at] += len(table.bring_in(asked[at][layer]))
        return found

    def prompt(self, length: int) -> tuple[Rows, Tensor]:
        """Rows of a prompt of random ids in one chunk, and the row whose logits are wanted."""
        ids = torch.randint(0, self.vocab, (length,)).tolist()
        blocks = tuple(range(1, 1 + -(-length // BLOCK)))
        return build_rows(
            [Chunk("p", 1, 0, tuple(ids), blocks, True)], block_size=BLOCK, device=DEVICE
        )

    def run_prompt(self, rows: Rows, wanted: Tensor) -> None:
        """Process a prompt up to its first token, and wait for that."""
        *_, logits = self.model.prefill(rows, self.pool, wanted)  # type: ignore[arg-type]
        assert logits is not None
        logits.argmax(-1).cpu()
