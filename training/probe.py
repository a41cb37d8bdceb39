"""A quick look at held-out skill without decoding: which turns would greedy get exactly right.

Greedy decoding reproduces a turn exactly when the argmax is right at each of its tokens given the
true ones before it, so one forward over whole dialogues counts exact turns. training/evaluate.py
gives the full picture (a turn that differs in its reasoning alone may still hold the right call).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from training.codec import ASSISTANT, EOS, PAD
from training.dialogues import Split
from training.model import TrainModel
from training.pack import generate, target_mask

DSML = 8


def turns(ids: np.ndarray) -> list[tuple[int, int, str]]:
    """(first token, past the EOS, kind) of each assistant turn; kind is call, answer or other."""
    found: list[tuple[int, int, str]] = []
    after_call = False
    for start in np.flatnonzero(ids == ASSISTANT):
        end = start + int(np.argmax(ids[start:] == EOS)) + 1
        call = bool((ids[start + 2 : end] == DSML).any())
        kind = "call" if call else "answer" if after_call else "other"
        found.append((int(start) + 2, int(end), kind))
        after_call = call
    return found


@torch.no_grad()
def exact_turns(
    model: TrainModel, split: Split, seed: int, count: int, budget: int = 65536
) -> dict[str, tuple[int, int]]:
    """Kind of turn -> (exact, all), and "token" -> (right, all) over assistant tokens."""
    ids, lengths = generate(seed, count, split)
    seqs = sorted(np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1]), key=len)
    score: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    at = 0
    while at < len(seqs):
        size = 1
        while at + size < len(seqs) and (size + 1) * (len(seqs[at + size]) + 64) <= budget:
            size += 1
        group = seqs[at : at + size]
        at += size
        width = -(-max(map(len, group)) // 64) * 64
        batch = torch.full((len(group), width), PAD, dtype=torch.long)
        for row, seq in zip(batch, group, strict=True):
            row[: len(seq)] = torch.from_numpy(seq)
        best = model.logits(batch.to(model.device)).argmax(-1).cpu().numpy()
        model.forget_tables()
        for row, seq in zip(best, group, strict=True):
            right = row[: len(seq) - 1] == seq[1:]
            mask = target_mask(seq)[1:]
            score["token"][0] += int((right & mask).sum())
            score["token"][1] += int(mask.sum())
            for start, end, kind in turns(seq):
                score[kind][0] += bool(right[start - 1 : end - 1].all())
                score[kind][1] += 1
    return {k: (a, b) for k, (a, b) in score.items()}
