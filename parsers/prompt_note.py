"""What a reply tells of its prompt beside the answer: how it was processed, and its scores.

Fields of ours in Chat Completions and in the raw route: `prompt_logprobs` asks for the
log-probability of every prompt token and of so many rivals, `prompt_logprobs_start` leaves out the
tokens before a position. A chat reply carries the scores in its extension field `bathyal`, a
completion in its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from parsers.body import Body, integer
from parsers.detokenize import Vocabulary
from parsers.errors import ClientError
from parsers.values import PromptNote, PromptScoring

SCORING = {"prompt_logprobs": integer(0, 20), "prompt_logprobs_start": integer(0)}


NO_NOTE = PromptNote(None, None)


def read_scoring(body: Body) -> PromptScoring | None:
    """Return what a body whose fields were checked by ``SCORING`` asks for.

    Raises:
        ClientError: a start is given, but no scores are asked for.
    """
    if "prompt_logprobs" in body:
        return PromptScoring(body["prompt_logprobs"], body.get("prompt_logprobs_start", 0))
    if "prompt_logprobs_start" in body:
        raise ClientError(
            "prompt_logprobs_start: needs prompt_logprobs", param="prompt_logprobs_start"
        )
    return None


def check_scoring(scoring: PromptScoring | None, prompt_tokens: int) -> None:
    """Raise unless the prompt has the position where scores are to begin.

    Raises:
        ClientError: it does not.
    """
    if scoring is not None and scoring.start >= prompt_tokens:
        raise ClientError(
            f"prompt_logprobs_start: expected a position of the prompt of {prompt_tokens} tokens,"
            f" got {scoring.start}",
            param="prompt_logprobs_start",
        )


def count_scores(note: PromptNote, scoring: PromptScoring | None) -> int:
    """Return how many log-probabilities the scores of a prompt are, those of rivals among them."""
    if note.scores is None or scoring is None:
        return 0
    return len(note.scores) * (1 + scoring.rivals)


def write_scores(
    note: PromptNote, prompt_ids: Sequence[int], scoring: PromptScoring, vocabulary: Vocabulary
) -> orjson.Fragment:
    """Spell the scores of a prompt, one entry for each token from the asked position on.

    Returns:
        A JSON array. It is written entry by entry: one call that writes millions of numbers would
        keep every other thread waiting for the interpreter.
    """
    assert note.scores is not None

    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        token = (vocabulary.bytes_of(token_id) or b"").decode("utf-8", "replace")
        return {"token_id": token_id, "token": token, "logprob": logprob}

    found: list[bytes] = []
    for token_id, score in zip(prompt_ids[scoring.start :], note.scores, strict=True):
        if score is None:
            found.append(b"null")
            continue
        own, rivals = score
        top = [spelled(rival, value) for rival, value in rivals]
        found.append(orjson.dumps({**spelled(token_id, own), "top_logprobs": top}))
    return orjson.Fragment(b"[" + b",".join(found) + b"]")
