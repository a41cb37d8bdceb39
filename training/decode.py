"""Greedy decoding with the training model, for evaluation on the GPU that trained it.

No caches: each step recomputes the batch. To make that cheap, a caller may pass the answer it
hopes for as a draft: one forward accepts the longest prefix that greedy decoding would have
produced, so only wrong answers are decoded token by token. The result is greedy decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.codec import PAD
from training.model import TrainModel


class GreedyDecoder:
    """Batched greedy decoding.

    Args:
        model: any dtype; evaluation wants fp32.
        eos: id that ends an answer; not part of it.
        max_new: most tokens per answer.
        budget: most padded tokens in one forward.
    """

    def __init__(self, model: TrainModel, eos: int, max_new: int = 320, budget: int = 65536):
        self.model, self.eos, self.max_new, self.budget = model, eos, max_new, budget

    @torch.no_grad()
    def _argmax(self, seqs: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[int]]:
        """Argmax after each position from starts[i] to the end of seqs[i]."""
        width = (max(map(len, seqs)) + 63) // 64 * 64
        ids = torch.full((len(seqs), width), PAD, dtype=torch.long)
        for row, seq in zip(ids, seqs, strict=True):
            row[: len(seq)] = torch.tensor(seq)
        x, _ = self.model.hidden(ids.to(self.model.device))
        rows = [b * width + t for b, s in enumerate(seqs) for t in range(starts[b], len(s))]
        picked = x[torch.tensor(rows, device=x.device)]
        best = (picked @ self.model.p["head.weight"].float().T).argmax(-1).tolist()
        self.model.forget_tables()
        out, at = [], 0
        for b, s in enumerate(seqs):
            n = len(s) - starts[b]
            out.append(best[at : at + n])
            at += n
        return out

    def _batches(self, order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        for i in sorted(order, key=lambda k: lengths[k]):
            width = (lengths[i] + 63) // 64 * 64
            if groups and (len(groups[-1]) + 1) * width <= self.budget:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def __call__(
        self, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]] | None = None
    ) -> list[list[int]]:
        """Answers without the EOS; one that never ended has max_new tokens."""
        answers: list[list[int]] = [[] for _ in prompts]
        open_ = set(range(len(prompts)))
        if drafts is not None:
            full = [[*p, *d, self.eos] for p, d in zip(prompts, drafts, strict=True)]
            for group in self._batches(list(open_), [len(s) for s in full]):
                tails = self._argmax(
                    [full[i][:-1] for i in group], [len(prompts[i]) - 1 for i in group]
                )
                for i, best in zip(group, tails, strict=True):
                    want = [*drafts[i], self.eos]
                    n = next(
                        (k for k, (a, b) in enumerate(zip(best, want, strict=True)) if a != b),
                        len(want),
                    )
                    if n == len(want):
                        answers[i] = list(drafts[i])
                        open_.discard(i)
                        continue
                    answers[i] = list(drafts[i][:n])
                    if best[n] == self.eos or n >= self.max_new:
                        del answers[i][self.max_new :]
                        open_.discard(i)
                    else:
                        answers[i].append(best[n])
        while open_:
            lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
            for group in self._batches(sorted(open_), lengths):
                seqs = [[*prompts[i], *answers[i]] for i in group]
                tails = self._argmax(seqs, [len(s) - 1 for s in seqs])
                for i, best in zip(group, tails, strict=True):
                    if best[0] == self.eos or len(answers[i]) >= self.max_new:
                        open_.discard(i)
                    else:
                        answers[i].append(best[0])
        return answers
