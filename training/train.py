"""Train the tiny checkpoint: `python -m training.train --out DIR --seconds 480`.

On several GPUs of one machine: `torchrun --nproc-per-node 2 -m training.train ...`; each process
has its own dialogues and gradients are averaged.

Stage 1 trains everything but the indexers on assistant tokens for a given time. Stage 2, on one
GPU, holds the model fixed and fits the indexers to its attention on long sequences. The result is
DIR/NAME.*.safetensors (bf16 matrices, fp32 small tensors) and a log; training/export.py makes the
official layout of it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import orjson
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.engram import fold_table
from training.codec import PAD
from training.dialogues import Split
from training.feed import Batch, Feed
from training.model import TrainModel
from training.optimizer import Muon, adamw, gradient, is_muon
from training.probe import exact_turns

CONFIG = Path(__file__).parents[1] / "engine" / "checkpoints" / "tiny" / "config.json"
#: a file that comes back from a lent machine is small; shards stay under this
SHARD_BYTES = 12 << 20


def tiny_fold(config: dict[str, Any]) -> np.ndarray:
    """Folded ids of the tiny checkpoint's tokenizer, as the engine computes them."""
    text = config["text_config"]
    limit = text["engram_compressed_vocab_size"]
    return fold_table(CONFIG.with_name("tokenizer.json"), text["vocab_size"], limit)


class Ranks:
    """The processes of one training run: one, or those torchrun started."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")

    def average(self, tensors: list[Tensor]) -> None:
        """Mean over the processes, in place."""
        if self.size > 1:
            flat = torch.cat([t.flatten() for t in tensors])
            dist.all_reduce(flat, dist.ReduceOp.AVG)
            parts = flat.split([t.numel() for t in tensors])
            for t, part in zip(tensors, parts, strict=True):
                t.copy_(part.view_as(t))

    def agree(self, value: float) -> float:
        """The first process's value."""
        if self.size > 1:
            box = torch.tensor([value], device="cuda")
            dist.broadcast(box, 0)
            return float(box)
        return value

    def close(self) -> None:
        """Leave the group; from here on each process is alone."""
        if self.size > 1:
            dist.destroy_process_group()


class Log:
    """Lines with the time since start, to the terminal and a file."""

    def __init__(self, path: Path) -> None:
        self.start = time.perf_counter()
        self.file: TextIO = path.open("w")

    def __call__(self, *words: object) -> None:
        line = f"[{time.perf_counter() - self.start:6.1f}] " + " ".join(map(str, words))
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def save(model: TrainModel, folder: Path, name: str) -> list[Path]:
    """Write all parameters in shards: matrices bf16, mHC, biases, norms and sinks fp32."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, value in model.p.items():
        small = "hc_" in key or value.ndim == 1 or key.endswith(("q_weight", "k_weight"))
        t = value.detach().to("cpu", torch.float32 if small else torch.bfloat16).contiguous()
        if size + t.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][key] = t
        size += t.nbytes
    paths = [folder / f"{name}.{i}.safetensors" for i in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        save_file(shard, path)
    return paths


def load_shards(stem: str) -> dict[str, Tensor]:
    """All tensors of STEM.*.safetensors.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(stem)
    files = sorted(path.parent.glob(path.name + ".*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no {stem}.*.safetensors")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(file)
    return found


@torch.no_grad()
def restore(model: TrainModel, stem: str) -> None:
    """Load what `save` wrote as STEM.*.safetensors; every tensor must be there and fit."""
    found = load_shards(stem)
    if missing := sorted(set(model.p) ^ set(found)):
        raise ValueError(f"{stem}.*.safetensors: names differ from the model's: {missing}")
    for name, value in found.items():
        model.p[name].copy_(value)


def schedule(done: float, step: int, warmup: int, flat: float) -> float:
    """Factor of the learning rate: linear warm-up, constant, then linear to 0."""
    rise = min(1.0, (step + 1) / warmup)
    return rise * (1.0 if done < flat else max(0.0, (1 - done) / (1 - flat)))


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Move one batch."""

    def move(x: np.ndarray) -> Tensor:
        t = torch.from_numpy(x)
        return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t

    return move(batch.ids), move(batch.rows), move(batch.targets), move(batch.weight)


def train_main(
    model: TrainModel, feed: Feed, ranks: Ranks, args: argparse.Namespace, log: Log
) -> None:
    """Stage 1."""
    params = {n: p for n, p in model.p.items() if p.requires_grad and ".indexer." not in n}
    rest = adamw({n: p for n, p in params.items() if not is_muon(n)}, args.lr, args.weight_decay)
    muon = Muon(
        {n: p for n, p in params.items() if is_muon(n)},
        model.shape.o_groups,
        args.momentum,
        args.weight_decay,
    )
    step, seen, start, done = 0, 0, 0.0, 0.0
    recent: list[Tensor] = []
    due = args.report_every
    for batch in feed:
        now = time.perf_counter()
        if step > args.compile_steps and step % 8 == 0:  # a clock all processes share
            done = ranks.agree((now - start) / args.seconds)
        if done >= 1 or step >= args.max_steps:
            break
        factor = schedule(done, step, args.warmup, args.flat)
        ids, rows, targets, weight = to_device(batch, model.device)
        loss, accuracy, loads = model.loss(ids, rows, targets, weight)
        loss.backward()
        ranks.average([gradient(p) for p in params.values()] + loads)
        norm = torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
        for group in rest.param_groups:
            group["lr"] = args.lr * factor
        rest.step()
        muon.step(args.muon_lr * factor)
        rest.zero_grad(set_to_none=True)
        for p in muon.groups.values():
            for tensor in p:
                tensor.grad = None
        with torch.no_grad():
            for i, load in enumerate(loads):
                bias = model.p[f"layers.{i}.ffn.gate.bias"]
                bias += args.bias_step * factor * (load.mean() - load).sign()
        step, seen = step + 1, seen + ids.numel()
        if step == args.compile_steps:  # compilation is not training time
            torch.cuda.synchronize() if model.device.type == "cuda" else None
            start = time.perf_counter()
            log("compiled; training time starts")
        recent.append(torch.stack([loss.detach(), accuracy, norm]))
        if step in (1, 10) or (start and time.perf_counter() - start >= due):
            mean = torch.stack(recent).mean(0).tolist()
            rate = ranks.size * seen / max(time.perf_counter() - log.start, 1e-9)
            spread = [f"{float(x.min()):.2f}-{float(x.max()):.2f}" for x in loads]
            log(
                f"step {step} t {now - start if start else 0:.0f} loss {mean[0]:.4f}",
                f"acc {mean[1]:.5f} norm {mean[2]:.2f} lr {factor:.3f} tokens {seen * ranks.size / 1e6:.1f}M",
                f"({rate / 1e3:.0f}k/s overall) loads {spread}",
            )
            recent.clear()
            due += args.report_every
    log(f"stage 1 done: {step} steps, {seen * ranks.size} padded tokens")


def train_indexers(model: TrainModel, feed: Feed, args: argparse.Namespace, log: Log) -> None:
    """Stage 2: the indexers learn where the model looks."""
    params = {n: p for n, p in model.p.items() if ".indexer." in n}
    opt = adamw(params, args.index_lr, 0.0)
    start, step, recent = time.perf_counter(), 0, []
    for batch in feed:
        done = (time.perf_counter() - start) / args.index_seconds
        if done >= 1 or step >= args.max_steps:
            break
        for group in opt.param_groups:
            group["lr"] = args.index_lr * schedule(done, step, 20, 0.3)
        ids = to_device(batch, model.device)[0]
        ids = ids[: max(1, args.index_tokens // ids.shape[1])]
        loss = model.index_loss(ids, (ids != PAD).float())
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        recent.append(loss.detach())
        if step % 50 == 0:
            log(f"indexers: step {step} cross entropy {torch.stack(recent).mean():.4f}")
            recent.clear()
    log(f"stage 2 done: {step} steps")


def parse_args() -> argparse.Namespace:
    """Command line."""
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--name", default="tiny")
    ap.add_argument("--seconds", type=float, default=480)
    ap.add_argument("--index-seconds", type=float, default=40)
    ap.add_argument("--tokens", type=int, default=61440, help="padded tokens of a batch")
    ap.add_argument("--index-tokens", type=int, default=24576)
    ap.add_argument("--workers", type=int, default=14)
    ap.add_argument("--first-block", type=int, default=0, help="of the data generator")
    ap.add_argument("--seed", type=int, default=0, help="of the initial weights")
    ap.add_argument("--start-from", help="stem of an earlier run's shards")
    ap.add_argument("--lr", type=float, default=2e-3, help="AdamW")
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--index-lr", type=float, default=2e-3)
    ap.add_argument("--momentum", type=float, default=0.95)
    ap.add_argument("--weight-decay", type=float, default=0.05)
    ap.add_argument("--bias-step", type=float, default=0.003, help="router load balancing")
    ap.add_argument("--warmup", type=int, default=150)
    ap.add_argument("--flat", type=float, default=0.35, help="share of the time at full rate")
    ap.add_argument("--max-steps", type=int, default=10**9)
    ap.add_argument("--compile-steps", type=int, default=24)
    ap.add_argument("--probe", type=int, default=600, help="dialogues of the closing look")
    ap.add_argument("--report-every", type=float, default=20)
    return ap.parse_args()


def main() -> None:
    """Run both stages and write the weights."""
    args = parse_args()
    ranks = Ranks()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / (f"{args.name}.log" if ranks.rank == 0 else f"rank{ranks.rank}.log"))
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = True
    first_block = args.first_block + ranks.rank * 10**6
    feed = Feed(args.tokens, args.workers, first_block)
    try:
        config = orjson.loads(CONFIG.read_bytes())
        model = TrainModel(config, tiny_fold(config), device, dtype, args.seed)
        if args.start_from:
            restore(model, args.start_from)
        log("parameters", sum(p.numel() for p in model.p.values()), model.shape)
        log(vars(args))
        plain = dict(model.f)
        if cuda:
            model.compile()
        train_main(model, feed, ranks, args, log)
    finally:
        feed.close()
    ranks.close()
    if ranks.rank:
        return
    save(model, args.out, args.name)
    model.f = plain
    if args.index_seconds > 0:
        long = Feed(args.tokens, args.workers, first_block + 10**8, min_length=512)
        try:
            train_indexers(model, long, args, log)
        finally:
            long.close()
    log("saved", [p.name for p in save(model, args.out, args.name)])
    model.dtype = torch.float32  # as the engine computes
    torch.backends.cuda.matmul.allow_tf32 = False
    for split in (Split.IN_DISTRIBUTION, Split.HELD_OUT):
        score = exact_turns(model, split, 0, args.probe)
        text = {k: f"{a}/{b} = {a / max(b, 1):.4f}" for k, (a, b) in sorted(score.items())}
        log("exact by teacher forcing,", split.name.lower(), text)


if __name__ == "__main__":
    main()
