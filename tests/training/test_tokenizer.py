"""The shipped tokenizer: exact, context-free for words, whole at the codec's boundaries."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

from training.codec import BOS, DSML, END_THINK, EOS, PAD, THINK, text_segments
from training.dialogues import make
from training.dialogues.lexicon import TOKENIZER
from training.pack import shipped_codec
from training.tokenizer import FIXED, SPECIAL, VOCAB_SIZE, build

CONFIG = orjson.loads(TOKENIZER.with_name("config.json").read_bytes())["text_config"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shipped file as the tokenizers library reads it."""
    return Tokenizer.from_file(str(TOKENIZER))


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    """2048 ids, the special ones where config.json says."""
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == CONFIG["vocab_size"]
    assert [tokenizer.token_to_id(t) for t in SPECIAL] == list(range(len(SPECIAL)))
    assert (CONFIG["bos_token_id"], CONFIG["eos_token_id"], CONFIG["pad_token_id"]) == (
        BOS,
        EOS,
        PAD,
    )
    assert CONFIG["engram_pad_token_id"] == PAD
    assert SPECIAL[CONFIG["dspark_noise_token_id"]] == "<｜place▁holder▁no▁799｜>"


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    """decode(encode(x)) == x, and the codec's tokenizer gives the same ids."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert shipped_codec().tokenizer.encode(text) == ids


@given(
    st.text(alphabet=st.characters(categories=["L", "Nd"]), min_size=1),
    st.sampled_from([" ", '"', ">", "'", ": ", "\n", "_", '": "', ' string="true">']),
    st.sampled_from(["", " ", '"', "</", ".", "\n", '"}', ",", "_"]),
)
def test_a_word_has_the_same_ids_anywhere(word: str, before: str, after: str) -> None:
    """Copying text is copying ids: a run of letters and digits is not touched by what is around."""
    encode = shipped_codec().tokenizer.encode
    ids, inside = encode(word), encode(before + word + after)
    assert inside == encode(before) + ids + encode(after)


def test_prompts_stop_where_the_codec_stops() -> None:
    """The prompt that `tool_choice: required` opens is a prefix of the free call's ids."""
    codec = shipped_codec()
    tool = {"type": "function", "function": {"name": "f"}}
    off = {"thinking": {"type": "disabled"}, "tools": [tool], "model": "DeepSeek-V4.1-Flash"}
    user = {"role": "user", "content": "x"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "y"}
    whole = codec.prompt_ids({**off, "messages": [user, turn, result]})
    free = codec.prompt_ids({**off, "messages": [user]})
    forced = codec.prompt_ids({**off, "messages": [user], "tool_choice": "required"})
    assert whole[: len(forced)] == forced
    assert forced[: len(free)] == free
    assert len(forced) > len(free)


def test_the_codec_finds_every_special_token() -> None:
    """Thinking, tools with history, forced calls, a reminder and an image can all be encoded."""
    codec = shipped_codec()
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    past = [user, {"role": "assistant", "content": "y", "reasoning_content": "z"}, user]
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    bodies = (
        ({"messages": [user]}, [THINK]),
        ({"messages": [user], "thinking": {"type": "disabled"}}, [END_THINK]),
        ({"messages": past, "tools": [tool]}, [DSML, EOS]),
        ({"messages": [{"role": "latest_reminder", "content": "r"}, user]}, [9]),
        ({"messages": [{"role": "user", "content": [image]}]}, [10]),
    )
    for body, wanted in bodies:
        ids = codec.prompt_ids({"model": "DeepSeek-V4.1-Flash", **body})
        assert set(wanted) <= set(ids)


def test_fixed_texts_are_whole_tokens(tokenizer: Tokenizer) -> None:
    """Each fixed text of the codec is one token where the codec writes it."""
    ids = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in FIXED}
    assert len(ids) == len(FIXED)
    seen: set[int] = set()
    for seed in range(300):
        seen.update(shipped_codec().dialogue_ids(make(seed)))
    assert ids <= seen


def test_texts_are_not_shredded(tokenizer: Tokenizer) -> None:
    """A rendered dialogue takes under a third as many tokens as characters."""
    texts = [t for seed in range(100) for t in text_segments(make(seed).body)]
    tokens = sum(len(tokenizer.encode(t, add_special_tokens=False).ids) for t in texts)
    assert tokens < sum(map(len, texts)) / 3


def test_the_builder_makes_a_tokenizer_of_the_same_form() -> None:
    """training.tokenizer rebuilds a file of this form from few dialogues, twice the same."""
    small = build(dialogues=400)
    assert small == build(dialogues=400)
    made, shipped = orjson.loads(small), orjson.loads(TOKENIZER.read_bytes())
    assert made.keys() == shipped.keys()
    assert made["added_tokens"] == shipped["added_tokens"]
    assert made["pre_tokenizer"] == shipped["pre_tokenizer"]
    assert len(made["model"]["vocab"]) == VOCAB_SIZE
