"""HTTP, SSE and the event grammar of each protocol."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.checks.registry import check, grammar
from conformance.model import Finding, Level, Mode
from conformance.protocols.observation import Observation, text

STREAM: tuple[Mode, ...] = ("stream",)
# What is judged by the clock; the runner repeats such a failure, see runner._again.
TIMED = frozenset({"stream/incremental", "stream/first-before-last"})


def _healthy(seen: Observation) -> bool:
    return not seen.faulty


@check("http/complete", kind="any", when=_healthy)
def complete(seen: Observation) -> Iterator[str]:
    """The reply ends properly and is not cut by the transport."""
    if seen.exchange.fault:
        yield f"the connection failed after {len(seen.exchange.body)} bytes: {seen.exchange.fault}"


@check("http/content-type")
def content_type(seen: Observation) -> Iterator[str]:
    """A stream is text/event-stream, a whole reply is application/json."""
    want = "text/event-stream" if seen.variant.mode == "stream" else "application/json"
    got = seen.exchange.headers.get("content-type", "")
    if got.split(";")[0].strip().lower() != want:
        yield f"expected content-type {want}, got {got!r}"


@check("http/json-body", modes=["whole"])
def json_body(seen: Observation) -> Iterator[str]:
    """A whole reply is one strict JSON object in UTF-8."""
    if seen.document is None:
        yield f"expected a JSON object, got {seen.exchange.body[:120]!r}"


@check("http/not-cached", level=Level.SHOULD, modes=STREAM)
def not_cached(seen: Observation) -> Iterator[str]:
    """A stream says Cache-Control: no-cache, so that no proxy between keeps or collects it."""
    got = seen.exchange.headers.get("cache-control", "")
    if "no-cache" not in got and "no-store" not in got:
        yield f"expected cache-control no-cache, got {got!r}"


@check("sse/utf8", modes=STREAM)
def utf8(seen: Observation) -> Iterator[Finding]:
    """Every line is UTF-8: no character is cut in two between frames."""
    for number, frame in enumerate(seen.frames):
        if frame.bad_utf8:
            yield Finding(f"not UTF-8: {frame.data[:80]!r}", number)


grammar("sse/json", "Every data line but [DONE] holds one JSON object.", modes=STREAM)


@check("sse/one-data-line", modes=STREAM)
def one_data_line(seen: Observation) -> Iterator[Finding]:
    """A frame has one data line; several line-based client readers know no other form."""
    for number, frame in enumerate(seen.frames):
        if frame.data_lines != 1:
            yield Finding(f"{frame.data_lines} data lines in one frame", number)


@check("sse/ends-whole", modes=STREAM, when=_healthy)
def ends_whole(seen: Observation) -> Iterator[str]:
    """The stream ends with a blank line; clients drop a frame that was not closed."""
    if seen.rest:
        yield f"bytes after the last frame: {seen.rest[:80]!r}"


@check("sse/event-name", modes=STREAM)
def event_name(seen: Observation) -> Iterator[Finding]:
    """Responses and Messages name each event as its data does; chat frames have no name."""
    chat = seen.variant.protocol == "chat"
    for number, event in seen.events:
        want = "" if chat else text(event.get("type"))
        got = seen.frames[number].event
        if got != want:
            yield Finding(f"expected event {want!r}, got {got!r}", number)


@check("sse/done", modes=STREAM, when=_healthy)
def done(seen: Observation) -> Iterator[str]:
    """A chat stream ends with one [DONE]; Responses and Messages have none."""
    marks = [n for n, frame in enumerate(seen.frames) if frame.data.strip() == "[DONE]"]
    want = [len(seen.frames) - 1] if seen.variant.protocol == "chat" else []
    if marks != want:
        yield f"[DONE] at frames {marks}, expected at {want} of {len(seen.frames)}"


def _timed(seen: Observation) -> bool:
    script = seen.variant.case.script
    return _healthy(seen) and script is not None and script.delay_ms > 0


@check("stream/incremental", modes=STREAM, when=_timed)
def incremental(seen: Observation) -> Iterator[str]:
    """The first text arrives long before the last: a stream is not one lump at the end."""
    if len(seen.frames) < 3:
        yield f"the whole reply came in {len(seen.frames)} frames"
        return
    # A quarter of the pauses between as many tokens as there are frames; a lump takes none.
    delay = seen.variant.case.script.delay_ms / 1000 if seen.variant.case.script else 0.0
    first = seen.exchange.arrival(seen.frames[1].end)
    last = seen.exchange.arrival(seen.frames[-1].end)
    if last - first < min(0.05, delay * (len(seen.frames) - 2) / 4):
        yield f"first frames after {first:.3f} s, the last after {last:.3f} s: a lump"


def _long(seen: Observation) -> bool:
    """A live reply of some length that took a while: only there a lump can be told."""
    words = seen.usages[-1].completion if seen.usages else None
    # What might be a call is rightly held back, and one that is withheld leaves a short remark.
    visible = not seen.declared or bool(seen.calls)
    return (
        _healthy(seen)
        and visible
        and seen.variant.case.tier == "live"
        and (words or 0) >= 16
        and len(seen.frames) > 1
        and seen.exchange.arrival(seen.frames[-1].end) >= 0.2
    )


@check("stream/first-before-last", modes=STREAM, when=_long)
def first_before_last(seen: Observation) -> Iterator[str]:
    """The first fragment is on its way before the last token is made."""
    # Sixteen tokens within 5 ms, in a reply that took 200 ms, were collected and not streamed.
    first = seen.exchange.arrival(seen.frames[1].end)
    last = seen.exchange.arrival(seen.frames[-1].end)
    if last - first < 0.005:
        yield f"all frames arrived together after {last:.3f} s"


@check(
    "cancel/engine-stops",
    kind="abandoned",
    when=lambda seen: seen.engine_left is not None,
)
def engine_stops(seen: Observation) -> Iterator[str]:
    """When the client hangs up, the server hangs up on its engine, which else works for nobody."""
    if seen.exchange.status != 200:
        yield f"expected status 200 before hanging up, got {seen.exchange.status}"
    elif not seen.engine_left:
        yield "the engine was not told within 5 s that nobody listens any more"


for _slug, _why in {
    "chat/chunk/envelope": "Each chunk has object, id, created, model and choices of the right type.",
    "chat/chunk/same-completion": "id, created and model are the same in every chunk.",
    "chat/chunk/choice-index": "With one choice every chunk's choice has index 0.",
    "chat/chunk/role-once": "The role is sent once, as assistant.",
    "chat/finish/last": "Behind the finish_reason comes at most a chunk without choices.",
}.items():
    grammar(_slug, _why, protocols=["chat"], modes=STREAM)
grammar(
    "chat/chunk/no-empty-calls",
    "tool_calls is absent or null where there is none; [] makes clients start a tool turn.",
    level=Level.SHOULD,
    protocols=["chat"],
    modes=STREAM,
)
grammar("chat/finish/known", "finish_reason is a value of the API.", protocols=["chat"])
grammar(
    "chat/whole/shape",
    "A completion object as the API describes it.",
    protocols=["chat"],
    modes=["whole"],
)
grammar(
    "chat/whole/no-empty-calls",
    "tool_calls is absent or null where there is none.",
    level=Level.SHOULD,
    protocols=["chat"],
    modes=["whole"],
)
grammar(
    "chat/content-before-calls",
    "Answer text does not go on after a call was opened; clients place it before the calls.",
    level=Level.SHOULD,
    modes=STREAM,
    protocols=["chat", "messages"],
)
grammar("stream/reasoning-first", "Thinking comes before the answer and its calls.", modes=STREAM)

for _slug, _why in {
    "responses/sequence-gapless": "sequence_number counts 0, 1, 2 … over all events.",
    "responses/lifecycle/begin": "The stream opens with response.created, response.in_progress.",
    "responses/lifecycle/one-end": "One of completed, incomplete, failed ends the stream, once.",
    "responses/envelope": "Lifecycle events carry the response object under `response`, with the status that their name says.",
    "responses/item/announced": "Each event names the item that output_item.added opened.",
    "responses/item/closed": "output_item.done closes an item before the next one or the end.",
    "responses/item/index-dense": "output_index counts items 0, 1, 2 …",
    "responses/part-bracketed": "Text deltas lie between the added and done events of their part.",
    "responses/deltas-join": "Deltas joined equal the text of the done event and of the item.",
    "responses/final-lists-items": "The final response lists the items the stream closed.",
}.items():
    grammar(_slug, _why, protocols=["responses"], modes=STREAM, when=_healthy)
grammar(
    "responses/item/shape",
    "Items carry id and type; calls carry call_id, name and argument text.",
    protocols=["responses"],
)
grammar(
    "responses/item/tool-kind",
    "A custom tool is called by a custom_tool_call, a function by a function_call.",
    protocols=["responses"],
)
grammar(
    "responses/whole/shape",
    "A response object as the API describes it.",
    protocols=["responses"],
    modes=["whole"],
)

for _slug, _why in {
    "messages/lifecycle/start-first": "message_start comes first, once.",
    "messages/lifecycle/delta-once": "One message_delta, behind all blocks and before message_stop.",
    "messages/lifecycle/stop-last": "message_stop comes last, once.",
    "messages/start-shape": "message_start carries an empty assistant message.",
    "messages/block/index-dense": "Blocks are numbered 0, 1, 2 …",
    "messages/block/one-at-a-time": "A block is stopped before the next one starts.",
    "messages/block/delta-fits": "A delta names the open block and fits its type.",
}.items():
    grammar(_slug, _why, protocols=["messages"], modes=STREAM, when=_healthy)
grammar(
    "messages/tool-use/input-by-deltas",
    "Tool input starts as {} and arrives by input_json_delta.",
    protocols=["messages"],
    modes=STREAM,
    when=_healthy,
)
grammar(
    "messages/tool-use/shape", "tool_use has id, name and an input object.", protocols=["messages"]
)
grammar(
    "messages/thinking-signed",
    "A thinking block carries one signature, without which clients cannot send it back.",
    protocols=["messages"],
    when=_healthy,
)
grammar(
    "messages/stop-reason",
    "stop_reason is a value of the API and fits stop_sequence.",
    protocols=["messages"],
)
grammar(
    "messages/usage",
    "message_start and message_delta carry token counts.",
    protocols=["messages"],
    modes=STREAM,
)
grammar(
    "messages/whole/shape",
    "A message object as the API describes it.",
    protocols=["messages"],
    modes=["whole"],
)
