"""All GPU figures of README in one go: every command once, most important first, a lane for each GPU.

    python -m bench.measure                  on all GPUs there are
    python -m bench.measure --minutes 9      what fits, in order of importance
    python -m bench.measure --only tests     some of the commands, by name or its beginning, in this order

Each command runs in a process of its own under a time limit and writes its rows as they come, so that
whatever ends the run, what was measured is kept. Lanes take the next command when they are free; one
GPU measures one command at a time. Commands share compiled kernels through Triton's cache on disk.

A command's output goes to bench/results/logs/NAME.log; those of GPU tests, together, to
bench/results/gpu-tests.log. BENCH_RESULTS names another folder for rows and logs. At the end README's
tables are written anew, and docs/paged-experts.png where its rows have changed and matplotlib is
installed. Exit code 1 if a command failed or was cut.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from bench import readme
from bench.rows import RESULTS, ROOT

LOGS = RESULTS / "logs"
#: Seconds that are kept for README at the end of a run of limited time.
REST = 5
TESTS = "tests-"


@dataclass(frozen=True, slots=True)
class Job:
    """One command.

    Args:
        name: of its log.
        command: after "python -m".
        seconds: it is ended after so many.
    """

    name: str
    command: str
    seconds: int


@dataclass(slots=True)
class Ended:
    """How a command ended.

    Args:
        name: of the job.
        code: exit code; None where it was cut.
        seconds: it took.
    """

    name: str
    code: int | None
    seconds: float


def engine(geometry: str, what: str, out: str, more: str = "") -> str:
    """Command of bench.engine."""
    return f"bench.engine --geometry {geometry} --what {what} --out {out} {more}".strip()


#: Tests of kernels that are the same on a GPU and in the interpreter; the others have real widths.
SAME = tuple(
    f"tests/engine/kernels/test_{name}.py"
    for name in (
        "accept", "block_attention", "embed", "feed", "fp4", "moe", "records", "roundtrip", "router",
        "weave",
    )
)  # fmt: skip
#: GPU tests by process, together all of them. Compiling takes most of the time, so each has workers
#: (pytest-xdist) that share its GPU; each begins with tests that lie together and share engines.
TEST_PARTS = (
    "tests/engine/kernels " + " ".join(f"--ignore={file}" for file in SAME),
    "tests/engine --ignore=tests/engine/kernels",
    " ".join(SAME),
)
QWEN = "bench.paged --geometry qwen3-30b-a3b"
BEYOND = "bench.paged --geometry v4-flash-43l --warm 16"
JOBS = (
    Job(
        "engine-v4",
        engine("v4-flash-8l", "decode,cached,long,load", "gpu-engine-v4-flash-8l"),
        240,
    ),
    Job(
        "prompts-v4",
        engine(
            "v4-flash-8l",
            "ttft,beside",
            "gpu-prompts-v4-flash-8l",
            "--batch 16 --mixed 1024,2048",
        ),
        120,
    ),
    Job(
        "engine-qwen",
        engine(
            "qwen3-30b-a3b",
            "decode,ttft",
            "gpu-engine-qwen",
            "--prompt 8192 --context 16384 --tokens 70000 --repeats 3",
        ),
        150,
    ),
    Job(
        "paged",
        f"{QWEN} --slots 40 --batch 1,4 --steps 192 --check --out gpu-paged-qwen",
        170,
    ),
    # Fair only while no other job has the host's cores: by itself, with --only.
    Job(
        "paged-baselines",
        f"{QWEN} --slots 40 --hit 0.9 --steps 24 --warm 8 --baselines"
        " --out gpu-paged-qwen-baselines",
        100,
    ),
    Job(
        "engine-v41",
        engine("v41-8l", "decode,cached,long", "gpu-engine-v41-8l"),
        160,
    ),
    Job(
        "prompts-v41",
        engine("v41-8l", "ttft,beside", "gpu-prompts-v41-8l", "--batch 16 --mixed 1024,2048"),
        120,
    ),
    Job(
        "replay",
        "bench.replay --geometry v41-40l --what ttft --tail-buckets 128 --seconds 225"
        " --out gpu-replay-v41-40l",
        240,
    ),
    Job(
        "replay-many",
        "bench.replay --geometry v41-40l --what many,cached --tail-buckets 128,512,1024"
        " --seconds 215 --out gpu-replay-v41-40l-many",
        230,
    ),
    Job(
        "replay-many-128",
        "bench.replay --geometry v41-40l --what many --many 16x32768x128x1 --prefill off,bounded"
        " --tail-buckets 128 --context 33280 --out gpu-replay-v41-40l-many-128",
        270,
    ),
    Job("speculate", "bench.speculate --geometry v41-8l --out gpu-speculate-v41-8l", 120),
    Job(
        "speculate-v4",
        "bench.speculate --geometry v4-flash-8l --acceptance 1.8 --out gpu-speculate-v4-flash-8l",
        80,
    ),
    Job(
        "step-v4",
        "bench.device_step --geometry v4-flash-8l --context 256,65536 --out gpu-step-v4-flash-8l",
        80,
    ),
    Job("start", "bench.start --geometry v4-flash-8l --out gpu-start", 150),
    Job("start-v41", "bench.start --geometry v41-8l --out gpu-start-v41-8l", 180),
    Job("greedy", "bench.greedy --out gpu-greedy-tiny", 140),
    *(
        Job(
            f"{TESTS}{number}",
            # pytest-benchmark, where it is installed, warns beside workers, and warnings are errors
            "pytest -m gpu -q -n 8 --dist worksteal -p no:cacheprovider -p no:benchmark"
            f" --durations=5 {part}",
            150,
        )
        for number, part in enumerate(TEST_PARTS, 1)
    ),
    Job(
        "ablation",
        engine(
            "v4-flash-8l",
            "decode",
            "gpu-ablation-v4-flash-8l",
            "--mode graph,eager --batch 1,64 --repeats 3 --new-tokens 16 --context 4096"
            " --tokens 70000",
        ),
        90,
    ),
    Job(
        "step-v41",
        "bench.device_step --geometry v41-8l --context 256,65536 --out gpu-step-v41-8l",
        80,
    ),
    Job(
        "paged-v4",
        f"{BEYOND} --slots 128 --resident-layers 30 --hit 0.67,0.81,0.887,0.9,0.95"
        " --out gpu-paged-v4-flash-43l",
        110,
    ),
    Job("beyond", "bench.beyond --out gpu-beyond-v4-flash-43l", 130),
    Job(
        "sweep",
        f'{QWEN} --slots 64,16,24,32,48,96 --hit "" --zipf --prompt 8192 --steps 64'
        " --out gpu-paged-sweep-qwen",
        130,
    ),
    Job(
        "paged-v4-80gb",
        f"{BEYOND} --slots 72 --resident-layers 10 --gpu-budget-gb 80"
        " --hit 0.67,0.81,0.887,0.9,0.95 --steps 48 --out gpu-paged-v4-flash-43l-80gb",
        150,
    ),
    Job(
        "paged-fp8",
        f"{QWEN} --slots 40 --fp8 --hit 0.5,0.67,0.81,0.887,0.9,0.95,0.99 --steps 64"
        " --out gpu-paged-qwen-fp8",
        130,
    ),
    Job(
        "prefetch",
        f"{QWEN} --slots 40 --hit 0.9 --prefetch 0.8,0.95,1.0 --steps 48"
        " --out gpu-paged-prefetch-qwen",
        100,
    ),
    Job(
        "replay-v41-12l",
        "bench.replay --geometry v41-12l --what tails,ttft,chunks --prompt 1024,8192,32768"
        " --tokens 70000 --out gpu-replay-v41-12l",
        120,
    ),
    Job(
        "paged-pins",
        f'{QWEN} --slots 40 --pins 32 --hit "" --steps 48 --out gpu-paged-pins-qwen',
        100,
    ),
    Job("peers", "bench.micro.peers --out gpu-peers", 90),
)


@dataclass(slots=True)
class Run:
    """Commands that wait, and those that have ended.

    Args:
        waiting: in order of importance.
        end: when everything must have ended, of time.monotonic().
        ended: so far.
        running: processes of those that run.
    """

    waiting: deque[Job]
    end: float
    ended: list[Ended] = field(default_factory=list)
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lane(self, gpu: int, cores: Collection[int] = ()) -> None:
        """Run commands on one GPU until none is left or the time is over.

        Args:
            gpu: its number.
            cores: that commands may use, so that lanes do not slow one another; all by default.
        """
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread, and so of what it starts
        while True:
            with self.lock:
                if not self.waiting:
                    return
                job = self.waiting.popleft()
            left = self.end - time.monotonic() - REST
            if left <= 0:
                self._note(Ended(job.name, None, 0.0), gpu)
                continue
            self._note(self._run(job, gpu, min(job.seconds, left)), gpu)

    def stop(self) -> None:
        """End what runs and begin nothing more."""
        with self.lock:
            self.waiting.clear()
            for process in self.running:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started

    def _run(self, job: Job, gpu: int, seconds: float) -> Ended:
        """Run one command, its output into its log."""
        begin = time.monotonic()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", *shlex.split(job.command)]
        with (LOGS / f"{job.name}.log").open("wb") as log:
            log.write(f"$ python -m {job.command}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with self.lock:
                self.running.add(process)
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            with self.lock:
                self.running.remove(process)
        return Ended(job.name, code, time.monotonic() - begin)

    def _note(self, ended: Ended, gpu: int) -> None:
        with self.lock:
            self.ended.append(ended)
            how = "cut" if ended.code is None else f"exit code {ended.code}"
            print(f"{ended.name}: {how} after {ended.seconds:.0f} s on GPU {gpu}", flush=True)
            if ended.name.startswith(TESTS):
                join_tests()


def shares(cores: Sequence[int], count: int) -> list[list[int]]:
    """Cores for each of some lanes, none twice; the same for all where there are too few."""
    each = len(cores) // count
    if not each:
        return [list(cores)] * count
    return [list(cores[i * each : (i + 1) * each]) for i in range(count)]


def join_tests() -> None:
    """Put the logs of GPU tests into one file."""
    logs = [LOGS / f"{job.name}.log" for job in JOBS if job.name.startswith(TESTS)]
    found = [log.read_bytes() for log in logs if log.exists()]
    (RESULTS / "gpu-tests.log").write_bytes(b"\n".join(found))


def draw_anew(since: float) -> None:
    """Draw the curve of paged experts if a file that it is drawn from was written meanwhile.

    Args:
        since: seconds since the epoch.
    """
    if find_spec("matplotlib") is None:
        print("docs/paged-experts.png: not drawn, matplotlib is not installed", flush=True)
        return
    from bench import paged_plot

    if any(path.stat().st_mtime >= since for path in paged_plot.sources()):
        paged_plot.draw(paged_plot.sources(), paged_plot.PICTURE)


def chosen(only: Sequence[str]) -> list[Job]:
    """Jobs by name or by the beginning of names, in the order of the words; all for none.

    Raises:
        SystemExit: a word is the beginning of no name.
    """
    if not only:
        return list(JOBS)
    found: dict[str, Job] = {}
    for word in only:
        named = [job for job in JOBS if job.name == word]
        named = named or [job for job in JOBS if job.name.startswith(word)]
        if not named:
            names = ", ".join(job.name for job in JOBS)
            raise SystemExit(f"--only: expected the beginning of one of {names}, got {word}")
        found |= {job.name: job for job in named}
    return list(found.values())


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=24 * 60, help="most that it may take")
    parser.add_argument("--gpus", type=int, default=0, help="how many to use; 0 for all")
    parser.add_argument("--only", nargs="*", default=[], help="names of commands, or beginnings")
    args = parser.parse_args()
    jobs, gpus = chosen(args.only), args.gpus or torch.cuda.device_count()
    if not gpus:
        parser.error("expected an NVIDIA GPU, torch finds none")
    LOGS.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    work = Run(deque(jobs), time.monotonic() + 60 * args.minutes)
    lanes = [
        threading.Thread(target=work.lane, args=(gpu, cores))
        for gpu, cores in enumerate(shares(sorted(os.sched_getaffinity(0)), gpus))
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    try:
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    finally:
        work.stop()
        readme.rewrite()
        draw_anew(begin)
    return int(any(ended.code != 0 for ended in work.ended))


if __name__ == "__main__":
    sys.exit(main())
