"""`bathyal engine plan --paged` and `--trace`: traces are checked, slots fit, and more slots never miss more."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from engine import TINY_CHECKPOINT
from engine.api import EngineError
from engine.architectures import read_config
from engine.cli import main
from engine.device.refusals import Gpu, check_engine
from engine.expert_paging import buffer_experts, experts_of, paging_of
from engine.memory import RESERVE, plan_memory
from engine.memory_items import ROUTED
from engine.options import EngineConfig, rule_of
from engine.paging_plan import ITEMSIZE, Wish, answer, split
from engine.plan.paging import learn
from engine.plan.residency import Residency
from engine.qwen3_config import Qwen3Config
from engine.resolve import facts_of, resolve
from engine.routing_trace import RoutingTrace, Step, read_trace, write_problem, write_trace
from tests.engine.model import build
from tests.engine.paging.checkpoints import CONFIG, write_qwen
from tests.engine.paging.test_serving import greedy, load, runner_of


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of long prompts for one expert: those of a small model's layers hold nearly all it has."""
    monkeypatch.setattr("engine.expert_paging.BUFFER_BYTES", 1)


def skewed(layers: int, experts: int, k: int, steps: int, seed: int = 0) -> RoutingTrace:
    """A trace in which layer i uses 2 + i experts mostly."""
    draw = np.random.default_rng(seed)

    def step(layer: int) -> Step:
        few = min(experts, k + layer)
        ids = draw.choice(few if draw.random() < 0.9 else experts, k, replace=False)
        return Step(ids[None].astype(np.int16), prompt=False)

    prompt = Step(np.tile(np.arange(k, dtype=np.int16), (5, 1)), prompt=True)
    return RoutingTrace(
        experts, k, tuple((prompt, *(step(i) for _ in range(steps))) for i in range(layers))
    )


@settings(max_examples=20)
@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=3), st.integers(0, 99))
def test_a_trace_comes_back(tmp_path_factory, flags: list[list[bool]], seed: int) -> None:  # type: ignore[no-untyped-def]
    """Whatever steps it has, layers without any included."""
    draw = np.random.default_rng(seed)
    layers = tuple(
        tuple(Step(draw.integers(0, 9, (draw.integers(1, 4), 2)).astype(np.int16), f) for f in line)
        for line in flags
    )
    file = tmp_path_factory.mktemp("trace") / "t.safetensors"
    write_trace(file, RoutingTrace(9, 2, layers))
    back = read_trace(file)
    assert (back.num_experts, back.per_row, len(back.layers)) == (9, 2, len(layers))
    for got, want in zip(back.layers, layers, strict=True):
        assert [s.prompt for s in got] == [s.prompt for s in want]
        assert all(np.array_equal(a.experts, b.experts) for a, b in zip(got, want, strict=True))


def test_a_trace_is_written_where_a_link_leads_and_as_other_files_are(tmp_path: Path) -> None:
    """The link stays one, a new file has the mode of all new ones, an old one keeps its own."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    before = os.umask(0o027)
    try:
        write_trace(link, skewed(1, 4, 2, 3))
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert len(read_trace(file).layers[0]) == 4
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    file.chmod(0o604)
    write_trace(link, skewed(1, 4, 2, 7))
    assert len(read_trace(file).layers[0]) == 8
    assert stat.S_IMODE(file.stat().st_mode) == 0o604


def test_what_cannot_be_written_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices, pipes, folders and links to themselves are refused before anything is served."""
    loop, lost, pipe = tmp_path / "loop", tmp_path / "lost", tmp_path / "pipe"
    loop.symlink_to(loop)
    lost.symlink_to(tmp_path / "no" / "file")
    os.mkfifo(pipe)
    device = "a device, a pipe or a socket"
    for path, told in (
        (Path("/dev/null"), device),
        (pipe, device),
        (tmp_path, "a folder"),
        (loop, "a link that leads back to itself"),
        (lost, "a file in a folder that does not exist"),
    ):
        with pytest.raises(EngineError) as error:
            load(TINY_CHECKPOINT, record_routing=path)
        want = f"record_routing {path}: expected a regular file, or a new one, got {told}"
        assert want in str(error.value)
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    assert write_problem(old) is None
    assert write_problem(new) is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert write_problem(old) == "a file that may not be written"
    assert write_problem(new) == "a file in a folder that may not be written"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers.0.rows": np.array([1, 1], np.int32)},
            "layer 0: rows: expected one number a step",
        ),
        (
            {"layers.0.experts": np.full((3, 2), 9, np.int16)},
            "expected ids from 0 to 8, got 9 to 9",
        ),
        ({"layers.0.experts": np.zeros((3, 3), np.int16)}, r"expected \[rows, 2\], got \[3, 3\]"),
    ],
)
def test_a_broken_trace_is_refused(
    tmp_path: Path, change: dict[str, np.ndarray], message: str
) -> None:
    """Named by layer and tensor, with what was expected."""
    tensors = {
        "layers.0.experts": np.zeros((3, 2), np.int16),
        "layers.0.rows": np.array([1, 2], np.int32),
        "layers.0.prompt": np.array([0, 1], np.uint8),
    } | change
    told = {"format": "bathyal-routing", "version": "1", "num_experts": "9",
            "num_experts_per_tok": "2", "num_hidden_layers": "1"}  # fmt: skip
    save_file(tensors, tmp_path / "t", metadata=told)
    with pytest.raises(EngineError, match=message):
        read_trace(tmp_path / "t")


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    """A safetensors file without our mark, and a file that is none."""
    save_file({"a": np.zeros(1)}, tmp_path / "a")
    with pytest.raises(EngineError, match="expected a routing trace, format 'bathyal-routing'"):
        read_trace(tmp_path / "a")
    (tmp_path / "b").write_text("hello")
    with pytest.raises(EngineError, match="not a routing trace"):
        read_trace(tmp_path / "b")


def test_split_is_the_memory_plans() -> None:
    """What tokens need beside routed experts is what the memory plan counts, to the byte.

    Paged or not: short passes over prompts are captured where nothing is paged only, and buffers that
    experts of long prompts pass through are there where something is.
    """
    config = read_config(TINY_CHECKPOINT)
    experts = experts_of(config, ITEMSIZE)
    stream = 2 * experts.count * experts.nbytes
    steps = []
    for paged, has_stream in ((True, True), (True, False), (False, True)):
        options = EngineConfig(
            max_model_len=512, max_num_seqs=4, num_blocks=16, max_batched_tokens=8192,
            expert_slots=3 if paged else None,
        )  # fmt: skip
        plan = plan_memory(config, options, itemsize=ITEMSIZE, budget=10**9, packed=True)
        assert any("of prompts" in item.what for item in plan.items) is not paged
        routed = sum(item.nbytes for item in plan.items if item.what == ROUTED)
        assert routed > 0
        found = split(config, Wish(10**9, 0, 512, 4), paged=paged, stream=has_stream)
        assert found.weights + found.kv + found.steps == plan.nbytes - routed
        assert found.stream == (stream if paged and has_stream else 0)
        left = 10**9 - int(10**9 * RESERVE) - found.stream
        assert found.experts == left - plan.nbytes + routed
        steps.append(found.steps)
    assert steps[0] == steps[1] < steps[2]


@pytest.mark.usefixtures("small_buffers")
def test_slots_fit_and_more_of_the_gpu_never_misses_more(tmp_path: Path) -> None:
    """Over a range of GPUs: room is kept, hit rates rise, the plan's misses are the tables' own."""
    config = read_config(write_qwen(tmp_path))
    experts = experts_of(config, ITEMSIZE)
    trace = skewed(3, 8, 2, 60)
    rates = []
    base = 10**7
    fixed = split(config, Wish(base, 0, 64, 2))
    for slots in (6, 9, 13, 18, 24):
        gpu = (base - fixed.experts - fixed.reserve + slots * experts.nbytes) / (1 - RESERVE)
        wish = Wish(int(gpu) + 64, 24 * experts.nbytes, 64, 2)
        found = answer(config, learn(trace.decode_steps(), 8), wish)
        assert found.plan is not None
        assert found.plan.gpu_experts <= max(0, found.split.experts) // experts.nbytes
        assert found.plan.gpu_experts <= slots
        rates.append(found.plan.hit_rate)
        for steps, k in zip(trace.decode_steps(), found.plan.slots, strict=True):
            table = Residency(8, k)
            for step in steps:
                table.bring_in(step)
            assert table.hits + table.misses == sum(map(len, steps))
    assert rates == sorted(rates)
    assert rates[-1] == 1.0
    assert rates[0] < 0.95


@pytest.mark.usefixtures("small_buffers")
def test_command_writes_what_the_engine_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a recorded trace to slots by layer to a served model with the same tokens."""
    path, trace, slots = write_qwen(tmp_path / "m"), tmp_path / "trace", tmp_path / "slots"
    core = load(path, record_routing=trace)
    tokens = greedy(core, [[5, 6, 7], [9] * 20], 10)
    core.close()
    config = read_config(path)
    experts = experts_of(config, ITEMSIZE)
    fixed = split(config, Wish(10**9, 0, 96, 4))
    fixed_bytes = 10**9 - fixed.experts - fixed.reserve
    gpu_gb = (fixed_bytes + 14.5 * experts.nbytes) / (1 - RESERVE) / 1e9
    asked = ["plan", "--model", str(path), "--trace", str(trace), "--out", str(slots),
             "--gpu-gb", str(gpu_gb), "--host-gb", "1", "--context", "96", "--concurrency", "4"]  # fmt: skip
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "hit rate" in told
    assert f"--model {path} --expert-slots-file {slots} " in told.splitlines()[-1]
    numbers = [int(line) for line in slots.read_text().split()]
    assert len(numbers) == 3
    assert sum(numbers) <= 14
    served = load(path, expert_slots_file=slots)
    assert [one.num_slots for one in runner_of(served).paged] == [k for k in numbers if k < 8]
    assert greedy(served, [[5, 6, 7], [9] * 20], 10) == tokens


@pytest.mark.usefixtures("small_buffers")
def test_without_a_trace_paged_layers_have_as_many_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the host has no room for stays whole; no hit rate is claimed; the engine takes the file."""
    path, slots = write_qwen(tmp_path / "m"), tmp_path / "slots"
    config = read_config(path)
    nbytes = experts_of(config, ITEMSIZE).nbytes
    fixed = split(config, Wish(10**9, 0, 96, 4))
    gpu_gb = (10**9 - fixed.experts - fixed.reserve + 15.5 * nbytes) / (1 - RESERVE) / 1e9
    host_gb = 16.5 * nbytes / 1e9  # two of three layers
    asked = ["plan", "--model", str(path), "--paged", "--out", str(slots), "--gpu-gb", str(gpu_gb),
             "--host-gb", str(host_gb), "--context", "96", "--concurrency", "4"]  # fmt: skip
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "hit rate  not known without --trace" in told
    assert "layer 0           8 slots, whole on the GPU" in told
    assert "layer 1-2         3 slots" in told
    (own,) = (line.split() for line in told.splitlines() if line.split()[:2] == ["96", "4"])
    assert own[4:] == ["1", "-", "-", "-"]
    assert slots.read_text().split() == ["8", "3", "3"]
    resident, served = load(path), load(path, expert_slots_file=slots)
    prompts = [[5, 6, 7], [9] * 20]
    assert greedy(served, prompts, 6) == greedy(resident, prompts, 6)


@pytest.mark.usefixtures("small_buffers")
def test_a_host_that_is_too_small_leaves_the_rest_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says how much, as the engine shares the host out, and that no step is captured."""
    path, trace = write_qwen(tmp_path / "m"), tmp_path / "trace"
    write_trace(trace, skewed(3, 8, 2, 20))
    config = read_config(path)
    nbytes = experts_of(config, ITEMSIZE).nbytes
    for module in ("expert_paging", "paging_plan", "paging_report"):
        monkeypatch.setattr(f"engine.{module}.GB", nbytes)
    fixed = split(config, Wish(10**9, 0, 96, 4), stream=False)
    gpu_gb = (10**9 - fixed.experts - fixed.reserve + 8.5 * nbytes) / (1 - RESERVE) / 1e9
    asked = ["plan", "--model", str(path), "--trace", str(trace), "--gpu-gb", str(gpu_gb),
             "--context", "96", "--concurrency", "4"]  # fmt: skip
    assert main([*asked, "--host-gb", str(10.5 * nbytes / 1e9)]) == 0
    told = capsys.readouterr().out
    assert f"files     {15 * nbytes:>18,}" in told  # each of three layers has three of its eight
    assert f"  stream  {0:>18,}" in told
    assert "captured  no decode steps: which experts a step reads from files is decided" in told
    assert main([*asked[:-6], "--gpu-gb", "0.0001", "--host-gb", "1"]) == 2
    failed = capsys.readouterr()
    assert "expected room on the GPU for" in failed.err
    assert f"others take: weights {fixed.weights:,}, kv" in failed.err
    assert not failed.out


def test_all_are_whole_only_where_prompts_can_be_captured_as_well() -> None:
    """What is captured where nothing is paged has its room, or something is paged."""
    config = read_config(TINY_CHECKPOINT)
    experts = experts_of(config, ITEMSIZE)
    all_of_them = experts.layers * experts.count * experts.nbytes
    base = Wish(10**9, 10**9, 512, 4)
    for paged in (False, True):
        needed = 10**9 - split(config, base, paged=paged).experts + all_of_them
        gpu_bytes = int((needed - 10**8 + experts.nbytes / 2) / (1 - RESERVE))
        found = answer(config, None, dataclasses.replace(base, gpu_bytes=gpu_bytes))
        assert found.plan is not None
        assert found.paging is not None
        assert found.paging.is_paged is paged
        assert found.split == split(config, found.wish, paged=paged)
        assert found.split.experts >= all_of_them


@pytest.mark.usefixtures("small_buffers")
def test_layers_that_need_no_file_have_buffers_beside_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinned experts may leave a layer so few that the host has them all: its prompts are streamed."""
    config = Qwen3Config.from_dict(CONFIG)
    nbytes = experts_of(config, ITEMSIZE).nbytes
    for module in ("expert_paging", "paging_plan"):
        monkeypatch.setattr(f"engine.{module}.GB", nbytes)
    draw = np.random.default_rng(0)
    share = np.array([30, 30, 30, 30, 30, 3, 2, 1]) / 156
    wide = [draw.choice(8, 2, replace=False, p=share).tolist() for _ in range(200)]
    learnt = learn([wide, [[0, 1]] * 200, [[0, 1]] * 200], 8)
    fixed = split(config, Wish(10**9, 0, 96, 1))
    gpu_bytes = int((10**9 - fixed.experts - fixed.reserve + 9.5 * nbytes) / (1 - RESERVE))
    found = answer(config, learnt, Wish(gpu_bytes, 15 * nbytes, 96, 1))
    assert found.plan is not None
    assert found.paging is not None
    assert [len(pins) for pins in found.plan.pins] == [3, 0, 0]
    assert found.paging.host_rows == {0: 5, 1: 5, 2: 5}
    assert found.paging.uses_disk
    assert found.paging.uses_stream
    assert found.split.stream == 2 * nbytes
    assert found.plan.gpu_experts * nbytes <= found.split.experts < 10 * nbytes


#: Experts of 0.2 GB, three layers of eight; prompts of DeepSeek's are captured where nothing is paged.
LARGE: dict[str, dict[str, Any]] = {
    "qwen": CONFIG | {"hidden_size": 4096, "moe_intermediate_size": 8192, "head_dim": 64,
                      "max_position_embeddings": 512},
    "v4": build.v4(hidden_size=4096, moe_intermediate_size=8192, num_hidden_layers=3,
                   n_routed_experts=8, num_experts_per_tok=2, compress_ratios=[0, 4, 16],
                   num_nextn_predict_layers=0, max_position_embeddings=512),
}  # fmt: skip


@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("host_gb", [0.001, 0.9, 1.0, 1.9, 2.7, 3.5, 4.4, 9.0])
@pytest.mark.parametrize("slots", [6.5, 9.5, 14.5, 23.9, 26.0])
def test_every_command_that_is_printed_is_taken(
    model: str,
    traced: bool,
    host_gb: float,
    slots: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the plan says to serve with is not refused, and the engine then does what the plan says.

    Where no whole GB serves it says so instead, of the plan alone, too.
    """
    path, trace, out = tmp_path / "m m", tmp_path / "trace", tmp_path / "slots"
    path.mkdir()
    (path / "config.json").write_bytes(orjson.dumps(LARGE[model]))
    write_trace(trace, skewed(3, 8, 2, 40))
    config = read_config(path)
    experts = experts_of(config, ITEMSIZE)
    fixed = split(config, Wish(10**10, 0, 300, 3))
    room = 10**10 - fixed.experts - fixed.reserve + slots * experts.nbytes
    gpu_bytes = int(room / (1 - RESERVE))
    how = ["--trace", str(trace)] if traced else ["--paged"]
    asked = ["plan", "--model", str(path), *how, "--host-gb", str(host_gb),
             "--gpu-gb", str(gpu_bytes / 1e9), "--context", "300", "--concurrency", "3"]  # fmt: skip
    code = main(asked)
    alone = capsys.readouterr()
    assert main([*asked, "--out", str(out)]) == code
    told = capsys.readouterr()
    if code:
        assert "--host-gb: experts that the host has no room for" in told.err
        assert host_gb < 2  # a GB has no room for two experts of each layer
        assert (told.out, alone.out, alone.err) == ("", "", told.err)
        assert not out.exists()
        return
    assert told.out.startswith(alone.out)
    program, verb, *words = shlex.split(told.out.splitlines()[-1])
    assert [program, verb, *words[:2]] == ["bathyal", "serve", "--model", str(path)]
    names = [word.removeprefix("--").replace("-", "_") for word in words[2::2]]
    given = {n: rule_of(n).parse(value) for n, value in zip(names, words[3::2], strict=True)}
    options = EngineConfig(device="cuda", **given)
    gpu = Gpu("GPU", (9, 0), gpu_bytes)
    facts = facts_of(config, options, gpu=gpu.name, gpu_nbytes=gpu.nbytes, cores=2, weight_bytes=1)
    found = resolve(options, facts).config
    check_engine(config, found, options, gpu, has_triton=True)
    assert (found.max_model_len, found.max_num_seqs, found.num_blocks) == (300, 3, 9)
    paging = paging_of(config, found, ITEMSIZE)
    assert ("expert_host_gb" in given) == ("files" in told.out) == paging.uses_disk
    # Steps that are captured.
    captured = re.search(
        r"captured  decode steps of (any number of|up to (\d+)) requests", told.out
    )
    assert found.graphs is (captured is not None)
    most = paging.most_captured_rows
    assert most == (0 if captured is None else captured[2] and int(captured[2]))
    # All that there is on the GPU, to the byte: what the engine's own plan says, slots and buffers.
    plan = plan_memory(config, found, itemsize=ITEMSIZE, budget=gpu_bytes, packed=True)
    (line,) = (line for line in told.out.splitlines() if line.startswith("  slots  "))
    others = sum(item.nbytes for item in plan.items if item.what != ROUTED)
    stream = 2 * buffer_experts(experts.count, experts.nbytes) * experts.nbytes
    stream *= paging.uses_stream
    left = gpu_bytes - plan.reserve - others - stream
    assert int(line.split()[1].replace(",", "")) == left
    held = sum(paging.slots.get(layer, experts.count) for layer in range(experts.layers))
    assert held * experts.nbytes <= left
    assert paging.is_paged is (held < 24)
    # Nothing is left unused but what is less than one in each layer, or more than the host allows.
    if not traced and not paging.uses_disk and paging.is_paged:
        assert left < (held + len(paging.slots)) * experts.nbytes


@pytest.mark.parametrize(
    ("context", "concurrency", "lines"),
    [(64, 4, 5), (64, 1, 4), (2, 1, 3)],
)
def test_no_line_of_the_table_stands_twice(
    context: int, concurrency: int, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of one request is one request, and no context is of fewer than two tokens."""
    flags = ["--paged", "--gpu-gb", "1", "--host-gb", "1"]
    sizes = ["--context", str(context), "--concurrency", str(concurrency)]
    assert main(["plan", "--model", str(TINY_CHECKPOINT), *flags, *sizes]) == 0
    table = capsys.readouterr().out.partition("ms a step\n")[2].partition("(")[0].splitlines()
    assert len(table) == len(set(table)) == lines


def test_a_trace_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by number; so is a trace without decode steps."""
    path, trace = write_qwen(tmp_path / "m"), tmp_path / "trace"
    asked = ["plan", "--model", str(path), "--trace", str(trace), "--host-gb", "1"]
    write_trace(trace, skewed(2, 8, 2, 5))
    assert main([*asked, "--gpu-gb", "1"]) == 2
    assert "trace: layers: expected the model's 3, got 2" in capsys.readouterr().err
    write_trace(trace, skewed(3, 8, 2, 0))
    assert main([*asked, "--gpu-gb", "1"]) == 2
    assert "expected decode steps of every layer, got 0" in capsys.readouterr().err


def test_all_sizes_that_are_missing_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, beside what else is wrong; a container's limit stands for the host's."""
    lacks = "expected gigabytes for a plan of slots, got none"
    monkeypatch.setattr("engine.cli.container_memory", lambda: None)
    assert main(["plan", "--paged", "--context", "1"]) == 2
    told = capsys.readouterr().err
    assert (
        f"--context: expected a whole number of at least 2, got 1; --gpu-gb: {lacks}; --host-gb: {lacks}"
        in told
    )
    monkeypatch.setattr("engine.cli.container_memory", lambda: 10**9)
    assert main(["plan", "--paged"]) == 2
    assert capsys.readouterr().err == f"bathyal engine plan: --gpu-gb: {lacks}\n"


def test_a_context_beyond_the_models_is_told_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twice the model's own context cannot be served: its line says so, in no option's words."""
    flags = ["--paged", "--gpu-gb", "1", "--host-gb", "1", "--context", "4096"]
    assert main(["plan", "--model", str(TINY_CHECKPOINT), *flags]) == 0
    told = capsys.readouterr().out
    assert "   8192        16  beyond the model's 4096 tokens of context" in told
    assert "captured  decode steps of any number of requests" in told
    assert "max_model_len" not in told
