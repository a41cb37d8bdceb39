"""Prefill modes of the reference model, in numbers.

The oracle of `bounded` is a model that processes every row in every layer, with the windows of the
late layers cut at the floor: in torch (`Cut`) for any length, and in the naive second
implementation. The oracle of `exact` is `off`. In float64 both agree to rounding noise (1e-10). In
float32 a row of logits agrees to 1e-6 of its norm, as any other chunking does, where no choice of
entries is so close that rounding decides it. Rings begin as large numbers, so that whoever reads a
row that was left out, shows.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from engine.api import PrefillMode
from engine.config import Layer
from engine.device.batch import ForwardBatch
from engine.device.kvpool import KVPool
from engine.model.checkpoint import load_model
from engine.model.engram import fold_table
from engine.model.v4 import Model, QueryBlock, Step
from engine.plan.replay import Stage
from engine.plan.step import Chunk
from tests.engine.model import build, drive
from tests.engine.model.drive import Request
from tests.oracle_naive.config import Config
from tests.oracle_naive.model import Naive, Vectors
from tests.oracle_naive.weights import load

FP64, FP32 = 1e-10, 1e-6
#: Around the window of 8 and around what exact mode keeps: 8 + 5 * 7 = 43 rows.
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 30, 42, 43, 44, 45, 60, 71)
EXTRA = 6  # tokens decoded after the prompt
MODES: tuple[PrefillMode, ...] = ("off", "exact", "bounded")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.write(tmp_path_factory.mktemp("v41") / "model", build.v41(), seed=5)


@pytest.fixture(scope="module")
def single(checkpoint: Path) -> Model:
    return load_model(checkpoint)


@pytest.fixture(scope="module")
def choiceless(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In float32, and every visible entry is attended."""
    config = build.v41(index_topk=512, candidate_topk_blocks=512)
    return load_model(build.write(tmp_path_factory.mktemp("v41") / "model", config, seed=5))


@pytest.fixture(scope="module")
def double(checkpoint: Path) -> Model:
    return load_model(checkpoint, dtype=torch.float64)


def low_of(model: Model, mode: PrefillMode, anchor: int, layer: int | None = None) -> int:
    assert model.tail is not None
    last = model.tail.num_layers - 1 if layer is None else layer
    return model.tail.low(mode, anchor, last)


class Cut(Model):
    """A model whose tail's windows are cut at a position; every row runs in every layer."""

    cut = 0

    def _block_mask(self, layer: Layer, block: QueryBlock, behind: int, step: Step) -> Tensor:
        mask = super()._block_mask(layer, block, behind, step)
        assert self.tail is not None
        if layer.index < self.tail.first:
            return mask
        first = block.span.start - behind
        hidden = max(0, min(self.cut, block.span.start + block.last) - first)
        mask = mask.clone()
        mask[..., 1 : 1 + hidden] = -torch.inf
        return mask


def cut_at(model: Model, position: int) -> Model:
    found: Cut = object.__new__(Cut)
    found.__dict__.update(model.__dict__)
    found.cut = position
    return found


@functools.cache
def reference(model: Model, seed: int, length: int, cut: int) -> Tensor:
    """Logits of all rows of a sequence, whole, with cut windows."""
    return drive.run(cut_at(model, cut), drive.tokens(length, seed))


@dataclasses.dataclass
class Prompt:
    """A sequence whose first `length` tokens are a prompt in some mode, with what it gives."""

    seed: int
    length: int
    mode: PrefillMode
    slot: int
    anchor: int
    rows: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request = Request(
            drive.tokens(self.length + EXTRA, self.seed),
            self.slot,
            range(1 + 10 * self.slot, 11 + 10 * self.slot),
        )

    @property
    def is_over(self) -> bool:
        return self.request.done == len(self.request.ids)

    def chunk(self, size: int) -> Chunk:
        """The next rows: of the prompt at most to its end, then one by one."""
        left = self.length - self.request.done
        found = self.request.chunk(max(1, min(size, left)))
        last = found.end >= self.length
        return found._replace(prefill=self.mode, anchor=self.anchor, wants_logits=last)

    def difference(self, model: Model) -> float:
        """Largest difference of a row that is wanted, as a share of its norm; NaN counts."""
        cut = low_of(model, self.mode, self.anchor) if self.mode == "bounded" else 0
        want = reference(model, self.seed, self.length + EXTRA, cut)
        first = 0 if self.mode == "off" else self.anchor
        want = want[first:]
        got = torch.stack([self.rows[p] for p in range(first, self.length + EXTRA)])
        return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def fresh(model: Model, slots: int = 5) -> KVPool:
    return drive.make_pool(model, num_slots=slots, num_blocks=10 * slots + 1)


def step(model: Model, pool: KVPool, pieces: Sequence[tuple[Prompt, int]]) -> None:
    """One pass; a prompt that starts finds large numbers in its slot's rings."""
    chunks = [prompt.chunk(size) for prompt, size in pieces]
    for chunk in chunks:
        if chunk.start == 0:
            pool.reset_slot(chunk.slot)
            for ring in pool.window:
                ring[chunk.slot] = 1000.0
    batch = ForwardBatch.build(chunks, tail=model.tail)
    with torch.inference_mode():
        hidden = model.hidden(batch, pool)
        logits = model.logits(hidden)
    spans = {span.chunk: span for span in hidden.batch.spans}
    for number, ((prompt, _), chunk) in enumerate(zip(pieces, chunks, strict=True)):
        if number in spans:
            span = spans[number]
            own = logits[span.row : span.row + span.length]
            prompt.rows.update(zip(range(span.start, span.end), own, strict=True))
        prompt.request.done = chunk.end


def finish(model: Model, pool: KVPool, prompts: Sequence[Prompt], sizes: list[int]) -> None:
    draw = random.Random(str(sizes))
    while waiting := [prompt for prompt in prompts if not prompt.is_over]:
        chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
        step(model, pool, [(prompt, draw.choice(sizes)) for prompt in chosen])


PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(LENGTHS), st.sampled_from(MODES), st.booleans()),
    min_size=1,
    max_size=4,
)


def prompts_of(drawn: list[tuple[int, int, PrefillMode, bool]]) -> list[Prompt]:
    """Requests in slots of their own; where asked, exact ones want rows from the middle on."""
    found = []
    for slot, (seed, length, mode, early) in enumerate(drawn, 1):
        anchor = 0 if mode == "off" else length - 1
        if early and mode == "exact":
            anchor = length // 2
        found.append(Prompt(seed, length, mode, slot, anchor))
    return found


@settings(max_examples=15)
@given(drawn=PROMPTS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_float64(
    double: Model, drawn: list[tuple[int, int, PrefillMode, bool]], sizes: list[int]
) -> None:
    """Any chunking in any company: bounded is the cut model, exact and off are the whole one."""
    prompts = prompts_of(drawn)
    finish(double, fresh(double), prompts, sizes)

    assert max(prompt.difference(double) for prompt in prompts) < FP64


@settings(max_examples=15)
@given(drawn=PROMPTS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_float32(
    choiceless: Model, drawn: list[tuple[int, int, PrefillMode, bool]], sizes: list[int]
) -> None:
    """The same in the precision that serves."""
    prompts = prompts_of(drawn)
    finish(choiceless, fresh(choiceless), prompts, sizes)

    assert max(prompt.difference(choiceless) for prompt in prompts) < FP32


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In float64, with the published window."""
    config = build.v41(sliding_window=128)
    path = build.write(tmp_path_factory.mktemp("wide") / "model", config, seed=5)
    return load_model(path, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("length", [126, 127, 128, 129, 130, 150])
@pytest.mark.parametrize("sizes", [[200], [1, 127]])
def test_lengths_around_the_published_window(
    wide: Model, mode: PrefillMode, length: int, sizes: list[int]
) -> None:
    """A prompt just shorter or longer than 128 rows, whole and in chunks that end around them."""
    prompts = prompts_of([(1, length, mode, False), (2, length - 1, "off", False)])
    finish(wide, fresh(wide), prompts, sizes)

    assert max(prompt.difference(wide) for prompt in prompts) < FP64


class NaiveCut(Naive):
    """The naive model with cut windows in its late layers."""

    first = cut = 0

    def attention(self, name: str, x: Vectors, layer: int) -> Vectors:
        self.layer = layer
        self.asked = -1
        return super().attention(name, x, layer)

    def attend(self, attn: str, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
        self.asked += 1  # the position: queries come in order
        if self.layer >= self.first:
            start = max(0, self.asked - self.c.sliding_window + 1)
            hidden = max(0, min(self.cut, self.asked + 1) - start)
            keys = keys[hidden:]
        if not len(keys):
            return np.zeros_like(q)
        return super().attend(attn, q, keys)


@pytest.mark.parametrize("length", [9, 20, 43])
def test_bounded_is_the_naive_cut_model(double: Model, checkpoint: Path, length: int) -> None:
    """Against a second implementation, position by position, in float64."""
    assert double.tail is not None
    prompt = Prompt(1, length, "bounded", 1, length - 1)
    finish(double, fresh(double), [prompt], [7, 30])
    config = Config.read(build.v41())
    classes = config.engram_compressed_vocab_size
    fold = fold_table(checkpoint / "tokenizer.json", config.vocab_size, classes).tolist()
    naive = NaiveCut(config, load(checkpoint), prompt.request.ids, fold=fold)
    naive.first, naive.cut = double.tail.first, low_of(double, "bounded", length - 1)

    want = naive.logits()

    rows = range(length - 1, length + EXTRA)
    assert max(abs(prompt.rows[p].numpy() - want[p]).max() for p in rows) < FP64


def memory(model: Model, mode: PrefillMode, sizes: list[int], length: int = 71) -> KVPool:
    """The pool after a prompt."""
    pool = fresh(model)
    prompt = Prompt(2, length, mode, 1, 0 if mode == "off" else length - 1)
    for size in sizes:
        if prompt.request.done < length:
            step(model, pool, [(prompt, size)])
    while prompt.request.done < length:
        step(model, pool, [(prompt, length)])
    return pool


def same_entries(left: KVPool, right: KVPool) -> bool:
    """Whether compressed entries, index keys and pending rows are the same bytes."""
    groups = ("entries", "index_keys", "state")
    for group in groups:
        for layer, tensor in getattr(left, group).items():
            other = getattr(right, group)[layer]
            at = 1 if group == "state" else slice(11, 21)
            if not torch.equal(tensor[at].nan_to_num(7.0), other[at].nan_to_num(7.0)):
                return False
    return torch.equal(left.history[1], right.history[1])


@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 40), max_size=6))
def test_what_others_read_is_the_same_in_all_modes(single: Model, sizes: list[int]) -> None:
    """I3: compressed entries and index keys of all rows are byte-equal; rings below the tail too."""
    off, exact, bounded = (memory(single, mode, sizes) for mode in MODES)

    assert single.tail is not None
    for pool in (exact, bounded):
        assert same_entries(pool, off)
        for layer in range(single.tail.first):
            assert torch.equal(pool.window[layer][1], off.window[layer][1])


@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 40), max_size=6), length=st.sampled_from(LENGTHS))
def test_exact_leaves_the_windows_of_off(double: Model, sizes: list[int], length: int) -> None:
    """I4: the rows that decode will read are there in every layer, and right."""
    off, exact = (memory(double, mode, sizes, length) for mode in ("off", "exact"))

    width = double.config.sliding_window
    rows = [p % width for p in range(max(0, length - width + 1), length)]
    for layer in range(double.config.num_hidden_layers):
        difference = (off.window[layer][1, rows] - exact.window[layer][1, rows]).abs()
        assert difference.numel() == 0 or difference.max() < FP64


@pytest.mark.parametrize(("length", "anchor"), [(43, 42), (30, 29), (8, 7), (60, 40), (71, 0)])
def test_equal_shapes_give_equal_bits(single: Model, length: int, anchor: int) -> None:
    """I5: where no row is left out, a wanted row is that of off bit for bit."""
    rows = []
    for mode in ("off", "exact"):
        pool = fresh(single)
        prompt = Prompt(0, length, mode, 1, 0 if mode == "off" else anchor)  # type: ignore[arg-type]
        for size in (20, 20, 40):
            if prompt.request.done < length:
                step(single, pool, [(prompt, size)])
        rows.append(prompt.rows)
    skipped = low_of(single, "exact", anchor)

    same = all(torch.equal(rows[0][p], rows[1][p]) for p in range(anchor, length))

    assert same or skipped > 0
    assert all((rows[0][p] - rows[1][p]).abs().max() < 1e-5 for p in range(anchor, length))


def test_a_chunk_without_a_row_in_the_tail(single: Model) -> None:
    """Of a chunk far from the prompt's end, the tail processes nothing, and nobody asks for it."""
    pool = fresh(single)
    prompt = Prompt(0, 60, "bounded", 1, 59)
    step(single, pool, [(prompt, 20)])

    assert prompt.rows == {}
    assert single.tail is not None
    assert float(pool.window[single.tail.first][1].max()) == 1000.0
    step(single, pool, [(prompt, 40)])
    assert sorted(prompt.rows) == list(range(52, 60))


# ------------------------------------------------------------ planted faults


def sees(model: Model, modes: Sequence[PrefillMode], sizes: Sequence[int] = (13, 1, 30)) -> bool:
    """Whether the comparison would fail, in float32 too."""
    for seed in range(3):
        for length in (9, 17, 45, 60):
            prompts = [
                Prompt(seed, length, mode, slot, length - 1) for slot, mode in enumerate(modes, 1)
            ]
            finish(model, fresh(model), prompts, [sizes[0], *sizes])
            if not max(prompt.difference(model) for prompt in prompts) < 1e-4:
                return True
    return False


def test_the_faults_are_planted_in_something_right(double: Model) -> None:
    """Without a fault, nothing is seen."""
    assert not sees(double, ["bounded", "exact"])


@pytest.mark.parametrize("change", [None, -1, 1], ids=["n1", "n2-low", "n2-high"])
def test_a_wrong_floor_is_seen(
    double: Model, monkeypatch: pytest.MonkeyPatch, change: int | None
) -> None:
    """n1, n2: a floor that is not applied, or off by one."""
    from engine.device import batch

    right = batch.stages

    def wrong(*args: object) -> tuple[Stage, ...]:
        found = right(*args)  # type: ignore[arg-type]
        return tuple(dataclasses.replace(s, floors=moved(s)) for s in found)

    def moved(stage: Stage) -> tuple[int, ...]:
        pairs = zip(stage.floors, stage.firsts, strict=True)
        return tuple(min(f + change, first) if f and change else 0 for f, first in pairs)

    monkeypatch.setattr(batch, "stages", wrong)

    assert sees(double, ["bounded"])


def test_a_chunks_own_window_is_seen(double: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """n3: with the last rows of each chunk and their floor, results depend on the chunks."""
    right = Prompt.chunk

    def wrong(self: Prompt, size: int) -> Chunk:
        found = right(self, size)
        return found._replace(anchor=min(found.anchor, found.end - 1))

    monkeypatch.setattr(Prompt, "chunk", wrong)

    assert sees(double, ["bounded"], (5, 3))


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_entries_of_the_tails_rows_alone_are_seen(
    double: Model, monkeypatch: pytest.MonkeyPatch, mode: PrefillMode
) -> None:
    """n4: with entries for the rows of the tail only, bytes differ, and so does what is read."""
    monkeypatch.setattr(Model, "_write_entries", lambda *args: None)

    assert not same_entries(memory(double, mode, [20, 20]), memory(double, "off", [20, 20]))
    assert sees(double, [mode])


@pytest.mark.parametrize("part", ["choice", "candidates", "written"])
def test_what_a_stage_hands_on_matters(
    double: Model, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Choices and candidates made before rows are left out hold for those that are left."""
    right: Callable[..., tuple[Step, Tensor]] = Step.narrow

    def wrong(self: Step, stage: Stage) -> tuple[Step, Tensor]:
        step, rows = right(self, stage)
        if part == "choice":
            step.block_choice = {}
            step.decode_choice = {}
        elif part == "candidates":
            step.block_candidates = {}
            step.decode_candidates = None
        else:
            step.span_entries = {key: value * 0 for key, value in step.span_entries.items()}
        return step, rows

    monkeypatch.setattr(Step, "narrow", wrong)

    assert sees(double, ["exact"])
