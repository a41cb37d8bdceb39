"""Runs steps with captured decode graphs, one step ahead of their results.

A step of the plan is served like this:

1. Pools: what is to be copied is copied, slots of new sequences are reset.
2. Decode rows: the plan's single tokens were launched ahead by the step before, or are launched now;
   with drafts to be verified beside them, where the runner has a drafter.
3. Prompts: one pass over all other chunks. Beside decode rows it advances by a few layers per step
   and stays *under way*; alone it runs to its end.
4. Lookahead: the next decode step is launched for the rows that go on. The device feeds them the
   tokens it drew, so the device never waits for the host.
5. Results of 2 are read, while 4 runs.

What was launched ahead is taken up by the next plan if it names the same request at the same
position, and forgotten if not. A row that was launched for a request which has ended is harmless. It
processed the token at position p, the number of tokens the request is known by. It wrote ring row
p mod W, and p - W is outside the window of whoever goes on at p; the same holds for the compressors'
rows and the n-gram history. It wrote the entry that ends with p, if one does, which is visible only to
those who process p themselves, and they write it first. And whoever gets a freed slot or block has
its writes behind these in the device's order.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from engine.api import EngineDeadError, ExpertStats, SamplingParams, TokenLogprob
from engine.device.buffers import DecodeBuffers, Readback
from engine.device.compiles import CompileWatch, compiling
from engine.device.expert_counts import ExpertCounts
from engine.device.graphs import GraphCache
from engine.device.kvpool import KVPool
from engine.device.lanes import Lanes
from engine.device.paged_state import hit_rates, paging_locks, slot_tensors
from engine.device.prompt_pass import Pool, PromptPass, StepModel
from engine.device.prompts import Prompts
from engine.device.recorder import RoutingRecorder
from engine.device.runner import StepResult
from engine.device.sampler import Draw, Sample, logprob_of, sample
from engine.device.seals import Seals
from engine.device.slices import SlicePolicy, Stopwatch
from engine.device.speculation import Block, Speculation
from engine.device.warm_up import warm_passes
from engine.kernels.feed import UNUSABLE, feed_torch, feed_triton
from engine.model.experts import PagedExperts
from engine.model.speculate import Speculator
from engine.options import DECODE_BUCKETS, buckets_up_to
from engine.plan.replay import Tail
from engine.plan.step import Chunk, StepPlan

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Flight:
    """A decode step that was launched.

    Args:
        rows: (arrival, position) of each request -> its row.
        bucket: rows it ran over.
        half: row of the results ring.
        logits: [bucket, V], until the next step is launched.
        plain: by arrival, why it is no speculative step, where there are such.
    """

    rows: dict[tuple[int, int], int]
    bucket: int
    half: int
    logits: Tensor
    plain: Mapping[int, str] = field(default_factory=dict)


class FastRunner:
    """A model with captured decode steps, and the memory of the requests it runs.

    Attributes:
        graphs: the decode steps.
        policy: how a prompt's pass is sliced.
        seals: of what the graphs use.
        compiles: kernels made ready so far.
        num_launched: decode steps launched.
        num_ahead: of them, launched before the results of the step before were read.
        num_wasted: of those, not taken up by the plan that followed.
        speculation: speculative steps; None where nothing is drafted.

    Args:
        model: the model.
        pool: its memory; has the slots and blocks that plans name, and a ring for the history.
        device: where both live.
        max_model_len: positions a request may have.
        max_num_seqs: most decode rows of a plan; buckets beyond it are not captured.
        captures: whether decode steps become CUDA graphs; they are called otherwise.
        looks_ahead: whether to launch decode steps ahead.
        buckets: row counts to capture.
        tail: late layers that may process fewer rows of a prompt; None where there are none.
        tail_buckets: row counts of tails to capture when prompts have warmed up; none for tails
            that are always launched one kernel after the other.
        prompt_buckets: likewise of passes over prompts.
        captured_rows: most rows of a decode step that is captured, where experts are paged; a
            bucket of its own. None for no limit.
        recorder: notes what rows are routed to.
        speculator: makes speculative steps of the model, whose rotary tables reach as many positions
            further as it drafts tokens.

    Raises:
        EngineError: kernels are fused, and no decode step runs one.
        ValueError: passes or their tails are to be captured of a model where they cannot be.
    """

    def __init__(
        self,
        model: StepModel,
        pool: Pool,
        device: torch.device,
        *,
        max_model_len: int,
        max_num_seqs: int,
        captures: bool = False,
        looks_ahead: bool = True,
        buckets: Sequence[int] = DECODE_BUCKETS,
        tail: Tail | None = None,
        tail_buckets: Sequence[int] = (),
        prompt_buckets: Sequence[int] = (),
        captured_rows: int | None = None,
        recorder: RoutingRecorder | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.looks_ahead = looks_ahead
        self.num_drafts = 0 if speculator is None else speculator.num_tokens
        self.policy = SlicePolicy()
        self._model = model
        self._pool = pool
        self._device = device
        self._has_tail = tail is not None
        self._feed = feed_triton if model.ops.name == "triton" else feed_torch
        buckets = buckets_up_to(max_num_seqs, buckets)
        if captured_rows and captured_rows < buckets[-1]:
            buckets = sorted({*buckets, captured_rows})
        self._recorder = recorder
        if recorder is not None:
            model.ops = recorder.watch(model.ops)
        self._buffers = DecodeBuffers(
            num_rows=buckets[-1],
            max_model_len=max_model_len + self.num_drafts,
            block_size=pool.block_size,
            vocab_size=model.config.vocab_size,
            device=device,
        )
        self.prompts = Prompts(
            model,
            pool,
            device,
            tail,
            max_model_len=self._buffers.max_model_len,
            captures=captures,
            tail_buckets=tail_buckets,
            buckets=prompt_buckets,
        )
        self.seals = Seals()
        self.seals.add("decode buffers", self._buffers.tensors)
        self.seals.add("kv pool", pool.named_tensors)
        self._paged = [e for e in model.experts if isinstance(e, PagedExperts)]
        self._expert_counts = ExpertCounts(self._paged, device)
        self.seals.add("expert slots", partial(slot_tensors, self._paged))
        self.graphs = GraphCache(
            self._decode,
            model,
            buckets,
            self.seals,
            captures=captures,
            captured_rows=captured_rows,
        )
        self._lanes = Lanes(self._buffers, self.graphs.bucket_for)
        self._readback = Readback(self._buffers, device)
        self._stopwatch = Stopwatch(device)
        self._half = 0
        self._ahead: Flight | Block | None = None
        self._pass: PromptPass | None = None
        self.num_launched = self.num_ahead = self.num_wasted = 0
        self.compiles = CompileWatch()
        self.speculation: Speculation | None = None
        if speculator is not None:
            assert isinstance(pool, KVPool)
            self.speculation = Speculation(
                speculator,
                pool,
                self._buffers,
                self._lanes,
                buckets,
                self.seals,
                captures=captures,
            )
        with torch.inference_mode():
            self._compile(partial(self._decode, bucket) for bucket in self.graphs.buckets)
            self.graphs.build()
            if self.speculation is not None:
                rehearse, sizes = self.speculation.rehearse, self.speculation.graphs.buckets
                self._compile(partial(rehearse, size) for size in sizes)
                self.speculation.build()
            self._buffers.half.zero_()
            self._begin_counts()

    def warm_up(self, max_batched_tokens: int) -> None:
        """Process prompts of every class of shapes, so that no request waits for a compile.

        Args:
            max_batched_tokens: rows of the longest chunk.
        """
        most = self._buffers.max_model_len
        longest = min(max_batched_tokens, most)
        chunks = warm_passes(
            longest,
            most,
            self._pool.block_size,
            self.graphs.buckets[-1],
            has_tail=self._has_tail,
            has_ends=self._device.type == "cuda",
        )
        passes = [partial(self._warm, *each) for each in chunks]
        prompts = self.prompts
        prompts.prepare(longest)
        rehearsals = [partial(prompts.rehearse, bucket) for bucket in prompts.buckets]
        with torch.inference_mode():
            self._compile([*passes, *rehearsals])
            for run in passes:
                run()
            prompts.build()
            self._begin_counts()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.compiles.serving()

    def _begin_counts(self) -> None:
        """Leave out of counters and the recording what was run for nobody."""
        self._expert_counts.begin()
        if self._recorder is not None:
            self._recorder.begin()

    def _compile(self, passes: Iterable[Callable[[], object]]) -> None:
        """Have all kernels of some passes compiled at once; they run afterwards.

        Where experts are paged or recorded the host reads what kernels write, so that passes only
        run, and kernels are compiled one by one.
        """
        if self._model.ops.name == "triton" and not self._paged and self._recorder is None:
            with compiling():
                for run in passes:
                    run()

    def _warm(self, *chunks: Chunk) -> None:
        """Process tokens that belong to nobody."""
        done = self._begin(chunks)
        done.advance(None)
        done.draw({0: Draw(SamplingParams(1, 1.0, 0.9, seed=0), 0)})

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows, and columns of its logits."""
        count: int = self._model.config.vocab_size
        return count

    @property
    def expert_stats(self) -> ExpertStats:
        """What paged experts have counted, up to a few steps ago."""
        return self._expert_counts.read()

    @property
    def weight_locks(self) -> tuple[str, ...]:
        """Why weights cannot be written in place."""
        count = len(self.graphs.captured)
        also = "".join(f" and {what} of {sizes}" for what, sizes in self.prompts.captured())
        return (
            f"decode steps of {count} batch sizes{also} are prepared over the weights' addresses",
            "projections that share an input are joined and scales multiplied in at load",
            *paging_locks(self._paged),
        )

    @property
    def paged(self) -> tuple[PagedExperts, ...]:
        """Experts that are paged, of each layer that has such."""
        return tuple(self._paged)

    def close(self) -> None:
        """Log how often paged experts were found, and write what was recorded.

        Raises:
            OSError: the file cannot be written.
        """
        try:
            with torch.inference_mode():
                self._expert_counts.settle()
            for line in hit_rates(self._paged, self._expert_counts.by_layer()):
                logger.info("%s", line)
        finally:  # what was recorded is on the host, even where the device is lost
            if self._recorder is not None:
                self._recorder.close()

    def step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        """Run a plan and draw one token per chunk that wants logits.

        Args:
            plan: what to run.
            draws: one for each chunk that wants logits, in the plan's order.

        Raises:
            SealError: a buffer that graphs use has moved.
            EngineDeadError: the device is lost, and with it all that is in its memory.
            Exception: whatever the model raised; nothing that was under way counts any more.
        """
        try:
            with torch.inference_mode():
                result = self._step(plan, draws)
                self._expert_counts.step()
                return result
        except BaseException:
            self._forget()
            raise

    def _step(self, plan: StepPlan, draws: Sequence[Draw]) -> StepResult:
        self._stopwatch.collect()
        wanting = iter(draws)
        draw_of = {c.arrival: next(wanting) for c in plan.chunks if c.wants_logits}
        flight, self._ahead = self._ahead, None
        streams, prompts = self._sort(plan, flight)
        if flight is not None and not streams:
            self.num_wasted += 1
            flight = None
        self._pool.copy(plan.slot_copies, plan.block_copies)
        for chunk in (*streams, *prompts):
            if chunk.start == 0:
                self._pool.reset_slot(chunk.slot)
        samples: dict[int, Sample | None] = {}
        most = self.graphs.buckets[-1]
        whole = len(streams) <= most
        while len(streams) > most:
            group, streams = streams[:most], streams[most:]
            samples |= self._results(self._launch_plain(group, draw_of), group, draw_of)
        if flight is None and streams:
            flight = self._launch(streams, draw_of)
        finished = self._run_prompts(prompts, beside=bool(streams))
        if flight is not None and whole and self._may_go_ahead(finished):
            going = [chunk for chunk in streams if chunk.goes_ahead]
            if self._lanes.can_keep(going):
                self._ahead = self._launch_ahead(going, draw_of, flight)
        further: dict[str, Sequence[Sample]] = {}
        plain: Mapping[int, str] = {}
        if isinstance(flight, Block):
            further, plain = self._take_block(flight, streams, draw_of, samples), flight.plain
        elif flight is not None:
            samples |= self._results(flight, streams, draw_of)
            plain = flight.plain
        scores: dict[str, dict[int, TokenLogprob]] = {}
        for done in finished:
            samples |= done.draw(draw_of)
            scores |= done.scores
        held = () if self._pass is None else self._pass.chunks
        return StepResult(
            [samples[c.arrival] for c in plan.chunks if c.arrival in samples],
            frozenset(chunk.request_id for chunk in held),
            scores,
            further,
            self.num_drafts,
            Counter(plain[c.arrival] for c in streams if c.arrival in plain),
        )

    def _sort(
        self, plan: StepPlan, flight: Flight | Block | None
    ) -> tuple[list[Chunk], list[Chunk]]:
        """Tell chunks for decode rows from those of prompts that begin now.

        Drops a pass under way whose requests have all ended. While a step that was launched ahead is
        under way, rows keep their places, so a stream it does not have goes the prompts' way.
        """
        held: tuple[Chunk, ...] = ()
        if self._pass is not None:
            held = tuple(chunk for chunk in self._pass.chunks if chunk in plan.chunks)
            if not held:
                self._pass = None
        streams, prompts = [], []
        for chunk in plan.chunks:
            if chunk in held:
                continue
            known = flight is None or (chunk.arrival, chunk.start) in flight.rows
            if chunk.is_stream and known:
                streams.append(chunk)
            else:
                prompts.append(chunk)
        return streams, prompts

    # ------------------------------------------------------------ decode rows

    def _decode(self, count: int) -> Tensor:
        """One decode step over the first rows of the buffers; what graphs capture."""
        b = self._buffers
        logits = self._model.decode(b.rows(count), self._pool)
        drawn, usable = self._model.ops.sample(
            logits,
            b.temperature[:count],
            b.top_p[:count],
            b.seeds[:count],
            b.index[:count],
            mask=b.mask[:count],
            forced=b.forced[:count],
        )
        self._feed(
            drawn,
            usable,
            b.slots[:count],
            b.ids[:count],
            b.positions[:count],
            b.index[:count],
            b.results,
            b.half,
        )
        return logits

    def _launch(self, chunks: Sequence[Chunk], draw_of: dict[int, Draw]) -> Flight | Block:
        """Launch a step whose tokens the host knows, with drafts where anybody's may be taken."""
        if self.speculation is None:
            return self._launch_plain(chunks, draw_of)
        plain = self.speculation.plain_rows(chunks, draw_of)
        if len(plain) == len(chunks):
            flight = self._launch_plain(chunks, draw_of)
            flight.plain = plain
            return flight
        speculation = self.speculation
        self._place(chunks, draw_of)
        return self._timed(lambda: speculation.launch(chunks, draw_of, plain))

    def _launch_plain(self, chunks: Sequence[Chunk], draw_of: dict[int, Draw]) -> Flight:
        self._place(chunks, draw_of)
        return self._fly(chunks, 0)

    def _place(self, chunks: Sequence[Chunk], draw_of: dict[int, Draw]) -> None:
        if self._lanes.place(chunks, [draw_of[chunk.arrival] for chunk in chunks]):
            self.seals.check()

    def _launch_ahead(
        self, chunks: Sequence[Chunk], draw_of: dict[int, Draw], before: Flight | Block
    ) -> Flight | Block | None:
        """Launch the step after the one these chunks are in; one of its kind.

        None where that would put off drafts, which only begin with tokens that the host knows.
        """
        speculation = self.speculation
        if isinstance(before, Flight) and speculation is not None:
            if len(chunks) <= speculation.graphs.buckets[-1]:
                return None
            reasons: Mapping[int, str] = {chunk.arrival: "batch" for chunk in chunks}
        else:
            reasons = {}
        self.num_ahead += 1
        if self._lanes.keep(chunks):
            self.seals.check()
        if isinstance(before, Block):
            assert speculation is not None
            return self._timed(lambda: speculation.launch_ahead(chunks, draw_of, before))
        flight = self._fly(chunks, 1)
        flight.plain = reasons
        return flight

    def _fly(self, chunks: Sequence[Chunk], further: int) -> Flight:
        rows = {
            (chunk.arrival, chunk.start + further): self._lanes.row_of(chunk) for chunk in chunks
        }
        bucket, half = self._lanes.bucket, self._half
        logits = self._timed(lambda: self.graphs.run(bucket))
        self._lanes.advance()
        self._half ^= 1
        self._readback.start(half, bucket)
        return Flight(rows, bucket, half, logits)

    def _timed(self, launch: Callable[[], T]) -> T:
        """Launch a step; note how long it takes where a prompt's pass is cut by that."""
        self.num_launched += 1
        if self._pass is None:
            return launch()
        found: T = self._stopwatch.time(launch, self.policy.saw_step)
        return found

    def _take_block(
        self,
        block: Block,
        chunks: Sequence[Chunk],
        draw_of: dict[int, Draw],
        samples: dict[int, Sample | None],
    ) -> dict[str, Sequence[Sample]]:
        """Wait for a speculative step: add first samples, give the others of those with drafts."""
        assert self.speculation is not None
        found = self.speculation.results(block, chunks, draw_of)
        if isinstance(self._ahead, Block):
            self.speculation.follow(self._ahead, [c for c in chunks if c.goes_ahead])
        further: dict[str, Sequence[Sample]] = {}
        for chunk in chunks:
            samples[chunk.arrival], *others = found[chunk.arrival]
            if chunk.arrival not in block.plain:
                further[chunk.request_id] = [sample for sample in others if sample is not None]
        return further

    def _may_go_ahead(self, finished: Sequence[PromptPass]) -> bool:
        """Whether the next plan's decode rows are this one's: no prompt has become a stream."""
        return self.looks_ahead and not any(
            chunk.wants_logits for done in finished for chunk in done.chunks
        )

    def _results(
        self, flight: Flight, chunks: Sequence[Chunk], draw_of: dict[int, Draw]
    ) -> dict[int, Sample | None]:
        """Wait for a step and give what it drew, by arrival."""
        tokens = self._readback.finish(flight.half, flight.bucket)
        found: dict[int, Sample | None] = {}
        for chunk in chunks:
            row = flight.rows[chunk.arrival, chunk.start]
            draw, token = draw_of[chunk.arrival], tokens[row]
            top = draw.params.top_logprobs
            if draw.params.moves_logits:
                # Nothing was launched ahead of it, so the row is written anew before the next step.
                (found[chunk.arrival],) = sample(flight.logits[row : row + 1], [draw])
            elif token == UNUSABLE:
                found[chunk.arrival] = None
            elif top is None:
                found[chunk.arrival] = Sample(token, None)
            else:
                found[chunk.arrival] = Sample(token, logprob_of(flight.logits[row], token, top))
        return found

    # ------------------------------------------------------------ prompts

    def _run_prompts(self, prompts: list[Chunk], *, beside: bool) -> list[PromptPass]:
        """Advance the pass under way, or begin one; give those that are through.

        Args:
            prompts: chunks that begin now.
            beside: whether decode rows run in this step too.
        """
        finished = []
        if strays := [chunk for chunk in prompts if chunk.is_stream]:
            finished.append(self._begin(strays))
            finished[0].advance(None)
        if begins := [chunk for chunk in prompts if not chunk.is_stream]:
            self._pass = self._begin(begins)
        current = self._pass
        if current is not None:
            layers = self.policy.layers(current.num_rows) if beside else None
            is_through = current.is_through
            if not is_through and self._advance(current, layers):
                # Drawing waits for the slice, and the streams would wait with it: it is for the next
                # step, which finds the logits ready.
                is_through = not beside or not current.wants_logits
            if is_through:
                finished.append(current)
                self._pass = None
        return finished

    def _advance(self, current: PromptPass, layers: int | None) -> bool:
        if layers is None:
            return current.advance(None)

        def tell(seconds: float) -> None:
            if done:  # this slice may have had fewer layers, or logits alone
                self.policy.saw_pass(current.num_rows)
            else:
                self.policy.saw_slice(current.num_rows, layers, seconds)

        done: bool = self._stopwatch.time(lambda: current.advance(layers), tell)
        return done

    def _begin(self, chunks: Sequence[Chunk]) -> PromptPass:
        return self.prompts.begin(chunks)

    # ------------------------------------------------------------ faults

    def _forget(self) -> None:
        """Drop all that is under way, after a fault.

        Raises:
            EngineDeadError: the device does not answer any more, as after a fault of a kernel.
        """
        self._ahead = None
        self._pass = None
        self._half = 0
        try:
            with torch.inference_mode():
                self._lanes.clear()
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
        except Exception as error:
            raise EngineDeadError("the device does not answer after a fault") from error
