"""Products with packed weights at V4-Flash's widths: `python -m bench.micro.linear [--quick]`.

For each product of a layer, and each number of rows: microseconds of every tiling tried, sorted,
the one that ships marked with *. A check against the torch twin comes first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.micro.timing import BANDWIDTH, RATE, copies, replayed_us
from engine.kernels import gemv, linear
from engine.kernels.formats import Matrix
from engine.kernels.roundtrip import round_trip_fp8

DEVICE = "cuda"


def fp8(n: int, k: int, block: int = 128) -> Matrix:
    """Random codes, none of them NaN, and scales near those of a checkpoint."""
    data = (torch.randint(0, 256, (n, k), device=DEVICE, dtype=torch.uint8) & 0xBF).view(
        torch.float8_e4m3fn
    )
    shape = -(-n // block), -(-k // block)
    scale = torch.randint(118, 122, shape, device=DEVICE, dtype=torch.uint8)
    return Matrix("fp8", data, scale, block)


def plain(n: int, k: int) -> Matrix:
    """Random bfloat16."""
    return Matrix("plain", torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / 64)


@dataclass(frozen=True)
class Case:
    """One launch of a layer.

    Args:
        name: of the product.
        weights: makes its weights, once per copy.
        width: of x.
        groups: as in `gemv.Job`.
        out_group: as in `gemv.Job`.
        parts: whether shares of K are left as summands.
        out: dtypes of the results.
    """

    name: str
    weights: Callable[[], list[Matrix]]
    width: int
    groups: int = 1
    out_group: int = 0
    parts: bool = False
    out: tuple[torch.dtype, ...] = (torch.bfloat16,)

    def jobs(self, x: Tensor, weights: list[Matrix], split: int) -> list[gemv.Job]:
        """Jobs on fresh outputs."""
        made = []
        for w, kind in zip(weights, self.out * len(weights), strict=False):
            shape = (len(x), split, w.shape[0]) if self.parts else (len(x), w.shape[0])
            out = torch.empty(shape, dtype=torch.float32 if self.parts else kind, device=x.device)
            made.append(gemv.Job(x, w, out, self.groups, self.out_group))
        return made


CASES = (
    Case("wq_a_wkv", lambda: [fp8(1536, 4096)], 4096),
    Case("wq_b+index", lambda: [fp8(32768, 1024), fp8(8192, 1024)], 1024),
    Case("wo_a", lambda: [fp8(8192, 4096)], 8 * 4096, groups=8, out_group=128),
    Case("wo_b", lambda: [fp8(4096, 8192)], 8192, parts=True),
    Case(
        "csa_inputs",
        lambda: [fp8(1536, 4096), plain(2048, 4096), plain(512, 4096), plain(64, 4096)],
        4096,
        out=(torch.bfloat16, torch.float32, torch.float32, torch.float32),
    ),
    Case("head", lambda: [plain(129280, 4096)], 4096, out=(torch.float32,)),
    Case("wo_a 32", lambda: [fp8(8192, 4096, 32)], 8 * 4096, groups=8, out_group=32),
)
#: (bn of fp8, bn of plain, programs aimed at, stages, warps) tried for every case.
TILINGS = (
    (128, 64, 132, 4, 4),
    (128, 64, 264, 4, 4),
    (128, 64, 528, 4, 4),
    (128, 128, 264, 6, 4),
    (128, 128, 264, 4, 8),
    (64, 64, 528, 5, 4),
    (64, 32, 264, 6, 4),
)


def tilings(case: Case, jobs: list[gemv.Job]) -> list[tuple[str, list[gemv.Config], int, int]]:
    """Configurations of all jobs of a case: (label, configs, stages, warps), the shipped one first."""
    found = [("*", [gemv.choose(job) for job in jobs], gemv.STAGES, gemv.WARPS)]
    for bn8, bn16, programs, stages, warps in TILINGS:
        configs = []
        for job in jobs:
            base = gemv.choose(job)
            bn = bn8 if job.w.kind == "fp8" else bn16
            if job.out_group:
                bn = max(bn, job.out_group)
            tiles = -(-job.w.shape[0] // bn) * -(-len(job.x) // 32)
            steps = -(-job.w.shape[1] // base.bk)
            split = max(1, min(programs // tiles, steps // 4))
            configs.append(gemv.Config(bn, base.bk, split))
        found.append((f"bn {bn8}/{bn16} programs {programs}", configs, stages, warps))
    return found


def check() -> None:
    """Compare every case with its twin in float32, at one row and at an odd number of rows."""
    worst = 0.0
    for case in CASES:
        weights = case.weights()
        for rows in (1, 37):
            x = torch.randn(rows, case.width, device=DEVICE, dtype=torch.bfloat16)
            jobs = case.jobs(x, weights, gemv.choose(gemv.Job(x, weights[0], x, case.groups)).split)
            gemv.launch(jobs, [gemv.choose(j) for j in jobs], stages=gemv.STAGES, warps=gemv.WARPS)
            for job in jobs:
                got = job.out.float()
                got = got.sum(1) if case.parts else got
                exact = linear.grouped_linear_torch(x.float(), job.w, case.groups)
                if case.out_group:
                    exact = round_trip_fp8(exact.bfloat16(), case.out_group).float()
                error = (got - exact).abs().max() / exact.abs().max()
                worst = max(worst, float(error))
    print(f"check: largest difference from the twin {worst:.2e} of the largest value")


def decode(quick: bool) -> list[str]:
    """Lines of the table, sorted within each case and number of rows."""
    lines = []
    for case in CASES:
        first = case.weights()
        nbytes = sum(w.nbytes for w in first)
        many = copies(nbytes, 8)
        sets = [first] + [case.weights() for _ in range(many - 1)]
        for rows in (1, 64) if quick else (1, 4, 16, 64):
            x = torch.randn(rows, case.width, device=DEVICE, dtype=torch.bfloat16)
            results = []
            options = tilings(case, case.jobs(x, first, 1))
            for label, configs, stages, warps in options[:1] if quick else options:
                calls = []
                for weights in sets:
                    jobs = case.jobs(x, weights, configs[0].split)

                    def call(
                        jobs: list[gemv.Job] = jobs,
                        configs: list[gemv.Config] = configs,
                        stages: int = stages,
                        warps: int = warps,
                    ) -> None:
                        gemv.launch(jobs, configs, stages=stages, warps=warps)

                    calls.append(call)
                try:
                    us = replayed_us(calls)
                except Exception as error:  # a tiling that does not fit is a result too
                    lines.append(f"{case.name} {rows} {label}: {type(error).__name__} {error}")
                    continue
                results.append((us, label, [(c.bn, c.bk, c.split) for c in configs], stages, warps))
            for us, label, shape, stages, warps in sorted(results)[:4] if not quick else results:
                share = nbytes / (us * 1e-6) / BANDWIDTH
                lines.append(
                    f"{case.name:11} T {rows:3} {us:8.2f} us {share:5.0%} of read bandwidth"
                    f"  {label:28} {shape} stages {stages} warps {warps}"
                )
            shipped = [r for r in results if r[1] == "*"]
            if shipped and not quick and shipped[0] not in sorted(results)[:4]:
                lines.append(f"{case.name:11} T {rows:3} {shipped[0][0]:8.2f} us shipped")
        del sets
    return lines


def prefill() -> list[str]:
    """Lines for many rows, whole operations as the model calls them."""
    lines = []
    for rows in (64, 128, 256, 1024, 8192):
        low = torch.randn(rows, 1024, device=DEVICE, dtype=torch.bfloat16)
        norm = torch.ones(1024, device=DEVICE)
        wq_b = (fp8(32768, 1024),)
        o = torch.randn(rows, 32768, device=DEVICE, dtype=torch.bfloat16)
        wo_a, wo_b = fp8(8192, 4096), fp8(4096, 8192)
        flops = {"norm_linear wq_b": 2 * 32768 * 1024, "attention_output": 4 * 8192 * 4096}
        calls: dict[str, Callable[[], object]] = {
            "norm_linear wq_b": lambda low=low, wq_b=wq_b, norm=norm: linear.norm_linear_triton(
                low, norm, 1e-6, wq_b, act_group=128
            ),
            "attention_output": lambda o=o, a=wo_a, b=wo_b: linear.attention_output_triton(
                o, a, b, 8, act_group=128
            ),
        }
        for name, call in calls.items():
            for most in (64, 256) if 64 < rows <= 256 else (64,):
                gemv.MAX_ROWS = most
                us = replayed_us([call, call], repeats=5)
                rate = flops[name] * rows / (us * 1e-6)
                how = "few rows" if rows <= most else "many"
                lines.append(f"{name:18} T {rows:5} {us:9.1f} us {rate / RATE:5.0%} of rate, {how}")
    gemv.MAX_ROWS = 64
    return lines


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the shipped tilings only")
    quick = parser.parse_args().quick
    check()
    lines = prefill() + decode(quick)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
