"""Experts that stay, through the engine: from a trace to a plan to a file to the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.architectures import read_config
from engine.cli import main
from engine.expert_paging import LayerSlots, experts_of, host_rows, paging_of, write_slots
from engine.memory import RESERVE
from engine.options import EngineConfig
from engine.paging_plan import ITEMSIZE, Wish, split
from engine.plan.residency import ABSENT
from engine.qwen3_config import Qwen3Config
from engine.routing_trace import RoutingTrace, Step, write_trace
from tests.engine.device.engines import requests, run, same
from tests.engine.paging.checkpoints import write_qwen
from tests.engine.paging.test_serving import PROMPTS, check_agree, greedy, load, runner_of, soak

#: Of three layers: most slots pinned, one pin, none.
FILE = "5: 6 0 3\n4: 7\n3\n"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "slots"
    found.write_text(FILE)
    return found


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_greedy_tokens_of_the_shipped_model_with_pins(tmp_path: Path, prefetch: bool) -> None:
    """Layers that are whole, paged, and paged with pins, in one model: resident tokens (J5)."""
    file = tmp_path / "slots"
    file.write_text("8\n2\n3: 5\n8\n7: 1 2 3 4 5\n4: 0 7\n2\n4: 7\n5: 0\n")
    core = load(TINY_CHECKPOINT, expert_slots_file=file, expert_prefetch=prefetch)
    paged = runner_of(core).paged
    assert [(one.num_slots, one.num_pins) for one in paged] == [
        (2, 0), (3, 1), (7, 5), (4, 2), (2, 0), (4, 1), (5, 1)
    ]  # fmt: skip
    assert greedy(core, PROMPTS) == greedy(load(TINY_CHECKPOINT), PROMPTS)
    for one in paged:
        one.check_integrity()
        assert one.store.shape[0] == 8


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_soak_with_pins(qwen: Path, file: Path, prefetch: bool) -> None:
    """Changing batch sizes, chunks and aborts: after every step pins and slots are true, tokens resident."""
    core = load(qwen, expert_slots_file=file, expert_prefetch=prefetch)
    soak(core, range(30, 32), every=1)
    resident, some = load(qwen), requests(random.Random(7), 12)
    assert same(run(core, some), run(resident, some), some)
    first, second, third = runner_of(core).paged
    assert first.state.slot_expert[:3].tolist() == [6, 0, 3]
    assert second.state.slot_expert[0].item() == 7
    assert third.num_pins == 0
    assert not first.store[[6, 0, 3]].any()
    assert not second.store[7].any()
    stats = core.stats().experts
    assert min(stats.hits, stats.misses) > 0


def test_a_pin_that_leaves_ends_the_soak(qwen: Path, file: Path) -> None:
    """With the marks gone, a pin is given up within the load and the check says which."""
    core = load(qwen, expert_slots_file=file)
    for one in runner_of(core).paged:
        one.state.last_use.zero_()
    with pytest.raises(RuntimeError, match="pinned expert 6 has left slot 0"):
        soak(core, range(30, 32), every=1)


def test_pins_beside_files(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with room for some of those that do not stay: resident tokens, and pins are in no row."""
    path = write_qwen(tmp_path / "m", num_experts=16)
    nbytes = experts_of(Qwen3Config.from_file(path), 4).nbytes
    monkeypatch.setattr("engine.expert_paging.GB", 5 * 3 * nbytes)
    resident, paged = load(path), load(path, expert_slots_file=file, expert_host_gb=1)
    some = requests(random.Random(1), 10)
    assert same(run(paged, some), run(resident, some), some)
    for one, pins in zip(runner_of(paged).paged, ((6, 0, 3), (7,), ()), strict=True):
        one.check_integrity()
        assert one.cache is not None
        assert len(one.cache.table) == 5
        assert not set(one.cache._residency.slot_expert) & set(pins)
        assert one.cache.figures.reads > 5


def test_pins_spare_a_host_the_files(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pinned needs no room: three layers of 8 with 4 pins fit where 20 experts do, not where 19 do."""
    path = write_qwen(tmp_path / "m")
    config = Qwen3Config.from_file(path)
    nbytes = experts_of(config, 4).nbytes
    for room, disk in ((20, False), (19, True)):
        monkeypatch.setattr("engine.expert_paging.GB", room * nbytes)
        found = paging_of(config, EngineConfig(expert_slots_file=file, expert_host_gb=1), 4)
        assert found.uses_disk is disk
        assert found.host_nbytes == (20 if not disk else 17) * nbytes
    assert found.most_captured_rows == 0
    assert paging_of(config, EngineConfig(expert_slots_file=file), 4).most_captured_rows == 1
    core = load(path, expert_slots_file=file)
    assert sum(one.host_nbytes for one in runner_of(core).paged) <= 20 * nbytes + 3 * 4096


def test_room_is_shared_by_what_is_needed() -> None:
    """All they need where there is room, else equal parts and no more than needed."""
    needs = {0: 5, 2: 7, 3: 8}
    assert host_rows(None, 10, needs) == needs
    assert host_rows(200, 10, needs) == needs
    assert host_rows(199, 10, needs) == {0: 5, 2: 6, 3: 6}
    assert host_rows(0, 10, {}) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5: 8\n4\n3", "layer 0, pinned experts: expected ids from 0 to 7, got 8"),
        ("5: 2 1 2\n4\n3", "layer 0, pinned experts: expected each once, got 2 more than once"),
        ("5\n4: 0 1 2\n3", "layer 1, pinned experts: expected at most 2: .*, got 3 for 4 slots"),
        ("5\n4\n2: 1", "layer 2, pinned experts: expected at most 0: .*, got 1 for 2 slots"),
        ("8: 1\n4\n3", "layer 0, pinned experts: expected none, since all lie on the device, got 1"),
        ("5: one\n4\n3", "expected slots of one layer, a colon and ids of pinned experts, got '5: one'"),
        (": 3\n4\n3", "expected slots of one layer, a colon and ids of pinned experts, got ': 3'"),
        ("5 4: 3\n3", "expected slots of one layer, a colon and ids of pinned experts, got '5 4: 3'"),
        ("5: 3: 4\n4\n3", "expected slots of one layer, .* got '5: 3: 4'"),
        ("-5: 3\n4\n3", "expected a whole number a line, got '-5' as number 1"),
    ],
)  # fmt: skip
def test_wrong_pins_are_refused(qwen: Path, file: Path, text: str, message: str) -> None:
    """By layer, with what was seen and what is accepted."""
    file.write_text(text)
    with pytest.raises(EngineError, match=message):
        load(qwen, expert_slots_file=file)


def test_every_wrong_pin_is_named_at_once(qwen: Path, file: Path) -> None:
    """All layers and all reasons in one message, those of other options too."""
    file.write_text("5: 9 9 1 2\n4: 12\n1\n")
    with pytest.raises(EngineError) as caught:
        load(qwen, expert_slots_file=file, graphs=True)
    message = str(caught.value)
    for part in ("layer 0, pinned experts: expected ids from 0 to 7, got 9",
                 "expected each once, got 9 more than once", "got 4 for 5 slots",
                 "layer 1, pinned experts: expected ids", "layer 2: expected 2",
                 "graphs on: expected an NVIDIA GPU"):  # fmt: skip
        assert part in message
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match=r"got a file that cannot be read \(not UTF-8\)"):
        load(qwen, expert_slots_file=file)


def test_weights_are_rebuilt_with_their_pins(qwen: Path, file: Path) -> None:
    """In place is refused; a rebuild has the same pins, in memory of their own, and the same tokens."""
    core = load(qwen, expert_slots_file=file)
    before = greedy(core, PROMPTS[1:])
    with pytest.raises(EngineError, match="12 of them lie in slots"):
        core.update_weights(qwen, in_place=True)
    core.update_weights(qwen)
    assert greedy(core, PROMPTS[1:]) == before
    assert [one.num_pins for one in runner_of(core).paged] == [3, 1, 0]
    for one in runner_of(core).paged:
        one.check_integrity()


def test_what_stays_is_logged(qwen: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At start, how many stay and what the host has; at the end, beside each layer's hits."""
    with caplog.at_level("INFO"):
        core = load(qwen, expert_slots_file=file)
        greedy(core, PROMPTS[1:])
        core.close()
    assert any("in slots, 4 experts stay there; 0.0 GB on the host" in m for m in caplog.messages)
    assert any(
        m.startswith("paged layer 0: 5 slots (3 of experts that stay), ") for m in caplog.messages
    )
    assert any(m.startswith("paged layer 2: 3 slots, ") for m in caplog.messages)


def favourites(layers: int, experts: int, steps: int) -> RoutingTrace:
    """A trace in which layer i asks for expert 5 - i in every step, and for others in turn."""

    def step(layer: int, at: int) -> Step:
        own = 5 - layer
        other = (own + 1 + at % (experts - 1)) % experts
        return Step(np.array([[own, other]], np.int16), prompt=False)

    return RoutingTrace(
        experts, 2, tuple(tuple(step(i, at) for at in range(steps)) for i in range(layers))
    )


def test_the_plan_names_what_stays(
    tmp_path: Path,
    qwen: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The experts asked for in every step, by layer; what the host is spared; the engine takes the file."""
    monkeypatch.setattr("engine.expert_paging.BUFFER_BYTES", 1)  # else all fit in place of buffers
    trace, slots = tmp_path / "trace", tmp_path / "slots"
    write_trace(trace, favourites(3, 8, 40))
    config = read_config(qwen)
    nbytes = experts_of(config, ITEMSIZE).nbytes

    def asked(concurrency: int) -> list[str]:
        """For a GPU with room for 11 experts beside what so many requests take."""
        fixed = split(config, Wish(10**9, 0, 96, concurrency))
        gpu = (10**9 - fixed.experts - fixed.reserve + 11.5 * nbytes) / (1 - RESERVE)
        return ["plan", "--model", str(qwen), "--trace", str(trace), "--out", str(slots),
                "--gpu-gb", str(gpu / 1e9), "--host-gb", "1", "--context", "96",
                "--concurrency", str(concurrency)]  # fmt: skip

    assert main(asked(1)) == 0
    told = capsys.readouterr().out
    lines = [line.split(":") for line in slots.read_text().splitlines()]
    pins = [list(map(int, tail[0].split())) if tail else [] for _, *tail in lines]
    assert all(5 - layer in some for layer, some in enumerate(pins))
    count = sum(map(len, pins))
    assert f"saved   {count * nbytes:>18,}  by {count} experts that stay on the GPU" in told
    for (k, *_), some in zip(lines, pins, strict=True):
        ids = " ".join(map(str, some))
        assert f"{k:>5} slots, {len(some)} of experts that stay: {ids}\n" in told
        assert int(k) - len(some) >= 2
    served = load(qwen, expert_slots_file=slots)
    assert [one.num_pins for one in runner_of(served).paged] == list(map(len, pins))
    assert greedy(served, PROMPTS[1:]) == greedy(load(qwen), PROMPTS[1:])
    # More requests at once want the slots for captured steps.
    assert main(asked(4)) == 0
    assert "saved" not in capsys.readouterr().out


def test_a_written_plan_is_read_back(tmp_path: Path, qwen: Path) -> None:
    """Slots and pins of each layer, layers without pins as a plain number."""
    file = tmp_path / "slots"
    write_slots(file, [LayerSlots(8), LayerSlots(5, (0, 7)), LayerSlots(3)])
    assert file.read_text() == "8\n5: 0 7\n3\n"
    found = paging_of(read_config(qwen), EngineConfig(expert_slots_file=file), 4)
    assert found.slots == {1: 5, 2: 3}
    assert found.pins == {1: (0, 7)}
    assert found.rooms == {1: 3, 2: 3}


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_captured_steps_keep_pins_on_a_gpu(qwen: Path, file: Path, prefetch: bool) -> None:
    """Captured steps, waves and streamed prompts in turn: resident tokens, and pins in their slots."""
    on = {"device": "cuda", "dtype": "float32"}
    paged = load(qwen, **on, expert_slots_file=file, expert_prefetch=prefetch)
    check_agree(soak(paged, range(6), every=3), soak(load(qwen, **on), range(6), every=99))
    torch.cuda.synchronize()
    assert ABSENT not in runner_of(paged).paged[0].state.expert_slot[[6, 0, 3]].tolist()
