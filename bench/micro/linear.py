"""Products with packed weights at V4-Flash's widths: `python -m bench.micro.linear [--quick]`.

For each product of a layer, at one row and at 64: microseconds of the tiling that ships, marked
with *, and of others. A check against the torch twin comes first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor

from bench.micro.timing import BANDWIDTH, RATE, copies, replayed_us
from engine.kernels import codes, gemv, linear
from engine.kernels.formats import Matrix

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
    Case("wq_b 32", lambda: [fp8(32768, 1280, 32)], 1280),
    Case("wo_a 32", lambda: [fp8(8192, 4096, 32)], 8 * 4096, groups=8, out_group=32),
)
#: (bn of fp8, bn of plain, most shares of K, stages or 0 for the shipped) tried beside it.
TILINGS = ((128, 128, 8, 0), (64, 64, 8, 0), (128, 64, 8, 6), (128, 64, 4, 0))


def tilings(case: Case, jobs: list[gemv.Job]) -> list[tuple[str, list[gemv.Config]]]:
    """Configurations of all jobs of a case, the shipped one first."""
    total = sum(job.w.nbytes for job in jobs)
    found = [("*", [gemv.choose(job, job.w.nbytes / total) for job in jobs])]
    for bn8, bn16, most, stages in TILINGS:
        configs = []
        for job in jobs:
            base = gemv.choose(job, job.w.nbytes / total)
            bn = max(bn8 if job.w.kind == "fp8" else bn16, job.out_group)
            split = min(base.split * bn // base.bn if bn > base.bn else base.split, most)
            configs.append(gemv.Config(base.bt, bn, base.bk, split, stages or base.stages))
        found.append((f"bn {bn8}/{bn16} shares {most}", configs))
    return found


def check() -> None:
    """Compare the grouped case with its twin in float32 at an odd number of rows."""
    w = fp8(8192, 4096)
    x = torch.randn(37, 8 * 4096, device=DEVICE, dtype=torch.bfloat16)
    got = linear.grouped_linear_triton(x, w, 8).float()
    exact = linear.grouped_linear_torch(x.float(), w, 8)
    error = float((got - exact).abs().max() / exact.abs().max())
    print(f"check: largest difference from the twin {error:.2e} of the largest value", flush=True)


def decode(quick: bool) -> None:
    """Print times as they are found."""
    for case in CASES:
        first = case.weights()
        nbytes = sum(w.nbytes for w in first)
        sets = [first] + [case.weights() for _ in range(copies(nbytes, 8) - 1)]
        for rows in (1, 64):
            x = torch.randn(rows, case.width, device=DEVICE, dtype=torch.bfloat16)
            options = tilings(case, case.jobs(x, first, 1))
            for label, configs in options[:1] if quick else options:
                calls = []
                for weights in sets:
                    jobs = case.jobs(x, weights, configs[0].split)
                    calls.append(partial(gemv.launch, jobs, configs))
                us = replayed_us(calls, repeats=8)
                share = nbytes / (us * 1e-6) / BANDWIDTH
                shape = [astuple(c) for c in configs]
                print(
                    f"{case.name:11} T {rows:3} {us:8.2f} us {share:5.0%} of read bandwidth"
                    f"  {label:24} {shape}",
                    flush=True,
                )
        del sets


def as_codes() -> None:
    """Print times of products of FP8 with FP8, tilings as shipped."""
    for case in CASES:
        first = case.weights()
        if case.groups > 1 or any(w.kind != "fp8" for w in first):
            continue
        nbytes = sum(w.nbytes for w in first)
        sets = [first] + [case.weights() for _ in range(copies(nbytes, 8) - 1)]
        for rows in (1, 16, 64):
            x = torch.randn(rows, case.width, device=DEVICE, dtype=torch.bfloat16)
            encoded = codes.encode_torch(x, first[0].block)
            calls: list[Callable[[], object]] = [
                partial(codes.run_parts, encoded, *ws)
                if case.parts
                else partial(codes.run, encoded, ws, x.dtype)
                for ws in sets
            ]
            us = replayed_us(calls, repeats=8)
            share = nbytes / (us * 1e-6) / BANDWIDTH
            cut = codes.choose(rows, first, parts=case.parts)
            print(
                f"{case.name:11} T {rows:3} {us:8.2f} us {share:5.0%} of read bandwidth"
                f"  as codes                 {astuple(cut)}",
                flush=True,
            )
        del sets


def prefill() -> None:
    """Print times for many rows, whole operations as the model calls them."""
    norm = torch.ones(1024, device=DEVICE)
    wq_b, wo_a, wo_b = (fp8(32768, 1024),), fp8(8192, 4096), fp8(4096, 8192)
    flops = {"norm_linear wq_b": 2 * 32768 * 1024, "attention_output": 4 * 8192 * 4096}
    for rows in (128, 8192):
        low = torch.randn(rows, 1024, device=DEVICE, dtype=torch.bfloat16)
        o = torch.randn(rows, 32768, device=DEVICE, dtype=torch.bfloat16)
        calls: dict[str, Callable[[], object]] = {
            "norm_linear wq_b": partial(
                linear.norm_linear_triton, low, norm, 1e-6, wq_b, act_group=128
            ),
            "attention_output": partial(
                linear.attention_output_triton, o, wo_a, wo_b, 8, act_group=128
            ),
        }
        for name, call in calls.items():
            for most in (64, 128) if rows == 128 else (64,):
                gemv.MAX_ROWS = most
                us = replayed_us([call, call], repeats=4)
                rate = flops[name] * rows / (us * 1e-6) / RATE
                how = "as few rows" if rows <= most else "as many"
                print(f"{name:18} T {rows:5} {us:9.1f} us {rate:5.0%} of rate, {how}", flush=True)
    gemv.MAX_ROWS = 128


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the shipped tilings only")
    quick = parser.parse_args().quick
    check()
    as_codes()
    decode(quick)
    prefill()


if __name__ == "__main__":
    main()
