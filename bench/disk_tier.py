"""What experts in files cost: reading them into host rows, from the page cache and from the disk.

    python -m bench.disk_tier --dir DIR [--expert-mb 9.4] [--experts 64] [--out NAME]

Writes a checkpoint of random experts to DIR (which should lie on the disk in question), then has
engine.model.disktier bring experts in as a step does, by waves of misses with read-ahead. Cold runs
drop the file from the page cache first (posix_fadvise); where the cache is not ours to drop, cold
and warm come out alike, and `cold_dropped` says whether it could be asked.

Rows, bench "disk_tier": ms an expert and GB/s, cold and warm, alone and read ahead of work of as
long a wave; `step_ms` is what a decode step of V4-Flash's or Qwen3-30B's size would wait at a given
share of experts that neither the GPU nor the host holds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.rows import make_rows, spread, write_rows
from engine.kernels.formats import Matrix
from engine.model.disktier import HostCache
from engine.model.expert_layout import ExpertLayout

FILE_EXPERTS = 16  # of one file
MISSES = (0.001, 0.01, 0.05)
#: Layers, experts a token takes in each, and megabytes of one.
MODELS = {"qwen3-30b-a3b": (48, 8, 9.44), "v4-flash": (43, 6, 13.37)}


class Experts:
    """Random experts in files.

    Args:
        folder: where.
        count: how many.
        nbytes: of one, about.
    """

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        self.count = count
        width = 1024
        self._rows = nbytes // (3 * 2 * width)  # three bfloat16 matrices
        self.files = []
        generator = torch.Generator().manual_seed(0)
        for first in range(0, count, FILE_EXPERTS):
            tensors = {}
            for expert in range(first, min(first + FILE_EXPERTS, count)):
                for part, rows in (("w13", 2 * self._rows), ("w2", self._rows)):
                    data = torch.randint(0, 2**15, (rows, width), generator=generator)
                    tensors[f"{expert}.{part}"] = data.to(torch.int16).view(torch.bfloat16)
            path = folder / f"model-{first:05}.safetensors"
            save_file(tensors, path)
            self.files.append(path)
        self._opened: list[Any] = [safe_open(path, framework="pt") for path in self.files]

    def read(self, expert: int) -> tuple[Matrix, Matrix]:
        """One expert, mapped."""
        opened = self._opened[expert // FILE_EXPERTS]
        w13, w2 = (opened.get_tensor(f"{expert}.{part}") for part in ("w13", "w2"))
        return Matrix("plain", w13), Matrix("plain", w2)

    def drop(self) -> bool:
        """Ask the kernel to forget what it has cached of the files."""
        if not hasattr(os, "posix_fadvise"):
            return False
        self._opened.clear()
        for path in self.files:
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        self._opened = [safe_open(path, framework="pt") for path in self.files]
        return True


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one run."""
    experts = Experts(args.dir, args.experts, int(args.expert_mb * 1e6))
    layout = ExpertLayout(experts.read(0))
    rows = max(4, args.experts // 4)
    dropped = experts.drop()
    common = {
        "bench": "disk_tier",
        "geometry": "random experts",
        "expert_mb": round(layout.nbytes / 1e6, 2),
        "experts": args.experts,
        "host_rows": rows,
        "cold_dropped": dropped,
    }
    per_expert = {}
    for mode in ("cold", "warm"):
        for ahead in (False, True):
            times, waits = [], []
            for _ in range(args.repeats):
                if mode == "cold":
                    experts.drop()
                cache = HostCache(layout, experts.read, args.experts, rows, pin=False)
                waits.append(_walk(cache, range(rows, args.experts), ahead=ahead))
                times.append(cache.figures.read_seconds / max(cache.figures.reads, 1) * 1e3)
            found = spread(times)
            per_expert[mode] = found["median"]
            yield {
                **common,
                "mode": f"{mode}, {'read ahead' if ahead else 'on demand'}",
                "ms_expert": found,
                "gb_s": round(layout.nbytes / found["median"] / 1e6, 2),
                "wait_ms_expert": spread(waits),
            }
    for name, (layers, k, megabytes) in MODELS.items():
        misses = layers * k * megabytes / (layout.nbytes / 1e6)
        for share in MISSES:
            yield {
                **common,
                "mode": f"{name}, {share:.1%} of experts from files",
                "step_ms": {mode: round(misses * share * ms, 2) for mode, ms in per_expert.items()},
            }


def _walk(cache: HostCache, order: range, *, ahead: bool) -> float:
    """Bring experts in by waves; gives the milliseconds of waiting an expert.

    Read ahead, every wave has work to do for as long as half of its reading takes.
    """
    size = cache.most
    waves = [list(order[first : first + size]) for first in range(0, len(order), size)]
    waited = 0.0
    cache.want(waves[0])
    for index, wave in enumerate(waves):
        following = waves[index + 1] if index + 1 < len(waves) else None
        if ahead and following:
            cache.want(following)
        begin = time.perf_counter()
        cache.rows(wave)
        waited += time.perf_counter() - begin
        if ahead:
            spent = cache.figures.read_seconds / max(cache.figures.reads, 1)
            time.sleep(len(wave) * spent / 2)
        elif following:
            cache.want(following)
    return waited / len(order) * 1e3


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="folder for the experts")
    parser.add_argument("--expert-mb", type=float, default=9.4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", metavar="NAME", help="of bench/results/NAME.jsonl")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    found = list(figures(args))
    for row in found:
        print({k: v for k, v in row.items() if k in ("mode", "ms_expert", "gb_s", "wait_ms_expert", "step_ms")})  # fmt: skip
    if args.out is not None:
        write_rows(args.out, make_rows("bench.disk_tier", "cpu", found))


if __name__ == "__main__":
    main()
