"""Makes the tokenizer of the tiny checkpoint: `python -m training.tokenizer OUT.json`.

Byte-level BPE of 2048 ids, built so that copying text is copying ids:

* Text is split without regard to its surroundings (a run of letters with at most one leading
  capital, a run of capitals, a digit, blanks, newlines, one symbol), so a word has the same ids
  after a blank, a quote or `>`.
* The codec's fixed texts and the glue of JSON and DSML are whole tokens (`ignore_merges`). They
  end where the codec ends a prompt: after ` calls>` and its newline.
* Merges are learned from the generator's own dialogues, weighted by the square root of a word's
  count, so that ordinary English words get tokens too.

The shipped file stays as it is: weights belong to it, and the generator has grown since it was
made, so that a file built today differs in its merges.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.codec import text_segments
from training.dialogues import make
from training.dialogues.lexicon import Lexicon, parts

VOCAB_SIZE = 2048
SPECIAL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>",
    "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜image｜>",
    "<｜place▁holder▁no▁799｜>",
)  # fmt: skip
# Fixed texts of the codec (as rendered for V4.1), cut at special tokens and at prompt ends.
FIXED = (
    "Reasoning Effort: ",
    " (range 1-100, the higher the value, the more thorough the reasoning)\n\n",
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can "
    "invoke tools by writing a \"<",
    " calls>\" block like the following:\n\n<",
    " calls>\n",
    " invoke name=\"$TOOL_NAME\">\n<",
    " parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</",
    " parameter>\n...\n</",
    " invoke>\n<",
    " invoke name=\"$TOOL_NAME2\">\n...\n</",
    " invoke>\n</",
    " calls>\n\nString parameters should be specified as is and set `string=\"true\"`. For all "
    "other types (numbers, booleans, arrays, objects), pass the value in JSON format and set "
    "`string=\"false\"`.\n\nIf thinking_mode is enabled (triggered by ",
    "), you MUST output your complete reasoning inside ",
    " BEFORE any tool calls or final response.\n\nOtherwise, output directly after ",
    " with tool calls or final response.\n\n### Available Tool Schemas\n\n",
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke "
    "tool calls.\n",
)  # fmt: skip
# Glue of DSML calls, of JSON and of the dialogues' fixed sentences. None begins or ends with a
# letter or blank that a copied value could own, save whole sentences.
_GLUE = (
    "\", \"parameters\": {\"type\": \"object\", \"properties\": {\"",
    "\", \"description\": \"\", \"parameters\": {", "\"}}, \"required\": [\"",
    "\": {\"type\": \"string\", \"description\": \"", "\"], \"additionalProperties\": false}}",
    "\n\n", "  ", "    ", "\n\n<", "</", " calls>", " parameter name=\"", "\" string=\"true\">", "\" string=\"false\">",
    " parameter>\n<", " parameter>\n</", " invoke name=\"", "\">\n<", "\">\n\n</",
    "{\"name\": \"", "\", \"description\": \"", "\", \"parameters\": {", "\"type\": \"",
    "\"properties\": {\"", "\"properties\": {", "\"required\": [\"",
    "\": {\"type\": \"", "\", \"enum\": [\"", "\", \"", "\"], \"", "\"]}}", "\"]}", "\"]",
    "\"}, \"", "\"}, ", "\"}}", "\"}", "}}", "{\"", "\": \"", "\": ", ", \"", "\", \"title\": \"",
    "{\"type\": \"", "\", \"items\": {\"type\": \"", "}, \"", "\"}}, ", "[\"",
    "\"}]", "}]", "\": {\"", "\": [\"", "\":\"", "\":", "\",\"", "{\n  \"", "\",\n  \"", "\n}",
    "<tool_result>", "</tool_result>", "\n\n<tool_result>", "{}", "[]", "...", "://", "__",
    "I should call ", "I have the result.", "No tool is needed.", "No declared tool fits.",
    "I have no tool for that.", "Hello! How can I help you?", "You are welcome!",
)  # fmt: skip
_WORDS = (
    r"\p{Lu}+(?!\p{Ll})|\p{Lu}?[\p{Ll}\p{Lo}\p{Lm}\p{Lt}\p{M}]+|\p{L}"
    r"|\p{N}|\n{1,2}| {1,4}|[^\p{L}\p{N}\s]|\s"
)

_POWER = 0.6  # frequent words count, but do not eat every merge
_OFTEN = 40  # invented words occur less often than that and teach nothing


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _splitter(phrases: tuple[str, ...]) -> Any:
    # re.escape writes a newline as backslash + newline, which the tokenizer's regex engine does
    # not read as one; \n it does
    longest_first = sorted(phrases, key=len, reverse=True)
    escaped = [re.escape(p).replace("\\\n", "\\n") for p in longest_first]
    pattern = "|".join([*escaped, _WORDS])
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level()]
    )


def _spelled(phrase: str) -> str:
    """A phrase in the vocabulary's byte alphabet."""
    return str(_byte_level().pre_tokenize_str(phrase)[0][0])


def build(dialogues: int = 12_000) -> bytes:
    """The tokenizer.json, learned from that many training dialogues.

    Raises:
        ValueError: a phrase never occurs (it is misspelled), or the sizes do not add up.
    """
    phrases = FIXED + _GLUE
    splitter = _splitter(phrases)
    counts: Counter[str] = Counter()
    for seed in range(dialogues):
        for text in text_segments(make((1 << 50) + seed, pieces=False).body):
            counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    spelled = {_spelled(p): p for p in phrases}
    missing = [p for s, p in spelled.items() if not counts[s]]
    if missing:
        raise ValueError(f"phrases that never occur: {missing}")
    decoder = decoders.ByteLevel()
    plain = Counter({decoder.decode([w]): n for w, n in counts.items() if w not in spelled})
    lexicon = Lexicon(held=False, pieces=())
    known = {*lexicon.plain, *lexicon.cities, *lexicon.names, *lexicon.surnames}
    known |= {w for p in (*lexicon.params, *lexicon.enums) for w in parts(p)}
    known |= {w.capitalize() for w in known}
    for rank, word in enumerate(lexicon.english):  # most frequent first
        plain[word] += 40_000 // (rank + 40)
        plain[word.capitalize()] += 8_000 // (rank + 40)
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = _splitter(())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(phrases),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = sorted(plain.items())
    bare.train_from_iterator(
        ((word + "\t") * int(n**_POWER) for word, n in words if word in known or n >= _OFTEN),
        trainer,
    )
    return _assemble(orjson.loads(bare.to_str()), list(spelled), splitter)


def _assemble(learned: Any, phrases: list[str], splitter: Any) -> bytes:
    pieces = sorted(learned["model"]["vocab"], key=learned["model"]["vocab"].get)
    order = [*SPECIAL, *phrases, *(p for p in pieces if p not in set(phrases))]
    if len(order) < VOCAB_SIZE:
        raise ValueError(f"only {len(order)} tokens learned, {VOCAB_SIZE} wanted")
    ids = {token: i for i, token in enumerate(order[:VOCAB_SIZE])}
    model = models.BPE(
        vocab=ids,
        merges=[
            (a, b)
            for a, b in map(tuple, learned["model"]["merges"])
            if a in ids and b in ids and a + b in ids
        ],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    data = orjson.loads(tokenizer.to_str())
    data["added_tokens"] = [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i, token in enumerate(SPECIAL)
    ]  # fmt: skip
    return orjson.dumps(data, option=orjson.OPT_INDENT_2)


def main() -> None:
    """Write tokenizer.json and say how long an average dialogue is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dialogues", type=int, default=12_000)
    args = parser.parse_args()
    args.out.write_bytes(build(args.dialogues))
    print(f"{args.out}: {Tokenizer.from_file(str(args.out)).get_vocab_size()} ids")


if __name__ == "__main__":
    main()
