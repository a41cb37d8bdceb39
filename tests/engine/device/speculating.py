"""Engines that speculate, with drafts that are right for a while because a test knows the tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.api import GenerateRequest
from engine.core import EngineCore
from engine.device.fast_runner import FastRunner
from engine.device.kvpool import KVPool
from engine.kernels.rows import Rows
from engine.model.drafting import Drafter, Pick
from engine.model.fast import FastModel
from engine.model.flow import Flow, Pass
from engine.model.loading import load_fast_model
from engine.model.speculate import Speculator, load_drafter
from engine.options import EngineConfig
from engine.plan.layout import Drafting
from engine.speculation import drafter_in
from tests.engine.device import engines
from tests.engine.device.engines import OPTIONS, Outcome

#: Id -> all tokens that a request has in the end, prompt first.
Truth = Mapping[str, Sequence[int]]


class Told:
    """A drafter beside which stands what the model will say: its drafts are right as far as drawn.

    Args:
        drafter: the model's own, which remembers and drafts too, for nothing.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.num_tokens, self.taps = drafter.num_tokens, drafter.taps
        self.core: EngineCore | None = None
        self.truth: Truth = {}
        self.draw = random.Random(0)

    def remember(self, state: Pass, flow: Flow) -> None:
        self._drafter.remember(state, flow)

    def propose(self, rows: Rows, pool: KVPool, pick: Pick) -> Tensor:
        own = self._drafter.propose(rows, pool, pick)
        if self.core is None:
            return own
        by_slot = {s.slot: s.request.id for s in self.core._scheduler._running}
        found = own.tolist()
        for line, slot, position in zip(found, rows.slots.tolist(), rows.positions.tolist(), strict=True):  # fmt: skip
            known = list(self.truth.get(by_slot.get(slot, ""), ()))[position + 1 :]
            right = self.draw.choice((0, 1, self.num_tokens, self.num_tokens))
            line[:right] = known[:right] + line[len(known[:right]) : right]
        return torch.tensor(found, dtype=torch.int64, device=own.device).view_as(own)


def load_speculating(path: Path) -> tuple[FastModel, Told, Drafting]:
    """A model in float32 with its drafter, told."""
    model = load_fast_model(
        path,
        kernels="torch",
        device="cpu",
        dtype=torch.float32,
        round_trips="off",
        max_model_len=engines.CONTEXT + 8,
    )
    drafting = drafter_in(model.config)
    told = Told(load_drafter(path, model, drafting))
    model.drafter = told
    return model, told, drafting


def make_speculating(
    loaded: tuple[FastModel, Told, Drafting],
    truth: Truth | None = None,
    options: EngineConfig = OPTIONS,
    **how: Any,
) -> EngineCore:
    """An engine that speculates; all that nobody holds is NaN in every step.

    Args:
        loaded: the model.
        truth: tokens of the requests to come; None drafts as the model's own stages do.
        options: of the engine.
        how: of the runner.
    """
    model, told, drafting = loaded
    pool = KVPool(
        model.config,
        num_blocks=options.resolve_num_blocks(engines.CONTEXT) + 1,
        block_size=options.block_size,
        num_slots=options.resolve_num_slots(),
        forms=model.forms,
        ring_history=True,
        drafting=drafting,
    )
    told.core = None  # while steps are made ready
    told.draw.seed(0)
    runner = FastRunner(
        model,
        pool,
        engines.CPU,
        max_model_len=engines.CONTEXT,
        max_num_seqs=options.max_num_seqs,
        speculator=Speculator(model, told),
        **{"buckets": (1, 2, 4, 6), **how},
    )
    core = EngineCore(runner, options, max_position_embeddings=engines.CONTEXT)
    engines.poison_what_is_free(core, pool)
    if truth is not None:
        told.core, told.truth = core, truth
    return core


def whole_texts(
    load: Sequence[tuple[GenerateRequest, int, int]], want: Mapping[str, Outcome]
) -> dict[str, list[int]]:
    """What each request's sequence will be, from an engine that does not speculate."""
    return {r.id: [*r.prompt_ids, *want[r.id].tokens] for r, _, _ in load}


def beyond(
    load: Sequence[tuple[GenerateRequest, int, int]],
) -> list[tuple[GenerateRequest, int, int]]:
    """The same requests, which nothing stops where they end."""
    found = []
    for request, wait, _ in load:
        sampling = dataclasses.replace(
            request.sampling, max_tokens=request.sampling.max_tokens + 8, stop_token_ids=()
        )
        found.append((dataclasses.replace(request, sampling=sampling), wait, 0))
    return found


def stop_inside(
    draw: random.Random,
    load: Sequence[tuple[GenerateRequest, int, int]],
    want: Mapping[str, Outcome],
) -> list[tuple[GenerateRequest, int, int]]:
    """The same load, where some requests get a stop id that comes in the middle of what they got."""
    found = []
    for request, wait, abort in load:
        tokens = want[request.id].tokens
        if len(tokens) > 2 and draw.random() < 0.6:
            stops = (draw.choice(tokens[1:]), *draw.sample(range(engines.VOCAB), draw.choice((0, 3))))  # fmt: skip
            sampling = dataclasses.replace(request.sampling, stop_token_ids=stops)
            request = dataclasses.replace(request, sampling=sampling)
        found.append((request, wait, abort))
    return found
