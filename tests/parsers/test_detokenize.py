"""Token ids to text: equal to what the codec writes, in any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from parsers import BootError, Codec
from parsers.detokenize import Detokenizer, Vocabulary
from parsers.dialects import MARK, THINK_END
from parsers.wire import Wire
from tests.parsers.support import chunks, drive, each, encode, message, open_chat, write_tokenizer

TEXTS = ["Hello <b>", "日本語 👩‍👩‍👧 é", "\x00\x7f\u2028", "שלום ￼", "a\ufffdb", "｜DSMＬ｜"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(codec: Codec, text: str) -> None:
    """Decoding the codec's own encoding gives the text."""
    ids = codec._tokenizer.encode(text)

    assert text == Detokenizer(codec.vocabulary).text(ids)
    assert text == Detokenizer(codec.vocabulary).text([*codec.vocabulary.spell(text)])


def test_real_markers_are_sentinels_and_spelled_ones_are_text(codec: Codec) -> None:
    """A real marker can be told from the same characters."""
    real = codec._tokenizer.encode("｜DSML｜</think><｜User｜>")
    plain = codec.vocabulary.spell("｜DSML｜</think>")

    assert f"{MARK}{THINK_END}<｜User｜>" == Detokenizer(codec.vocabulary).text(real)
    assert Detokenizer(codec.vocabulary).text(plain) == "｜DSML｜</think>"


def test_half_a_character_is_held_let_go_and_dropped(codec: Codec) -> None:
    """Held until whole; U+FFFD when it cannot become whole; nothing at the end."""
    first, second = codec.vocabulary.spell("é")
    letter, marker = codec._tokenizer.encode("a")[0], codec._tokenizer.encode("｜DSML｜")[0]

    def pieces(*ids: int) -> list[str]:
        detokenizer = Detokenizer(codec.vocabulary)
        return [detokenizer.push(id_) for id_ in ids]

    assert pieces(first, second) == ["", "é"]
    assert pieces(first, letter) == ["", "\ufffda"]
    assert ["", f"\ufffd{MARK}"] == pieces(first, marker)
    assert pieces(second, second) == ["", ""]
    assert pieces(10**9) == [""]


@given(data=st.data())
@settings(max_examples=200)
def test_any_ids_decode_as_the_codec_decodes_them(bare: Codec, data: st.DataObject) -> None:
    """Random ids, broken UTF-8 among them, give the text the codec writes for them."""
    ids = data.draw(st.lists(st.one_of(st.integers(3, 300), st.integers(3, 127_999)), max_size=12))
    quiet = {"thinking": {"type": "disabled"}, "stream": True}
    size = data.draw(st.integers(1, 12))

    reply = message(chunks(drive(open_chat(bare, **quiet), each(ids, size))))

    # the codec drops the newlines at the head of an answer, and we leave that to it
    assert reply["content"] == Detokenizer(bare.vocabulary).text(ids).lstrip("\n")


def test_a_tokenizer_that_cannot_serve_is_named(tmp_path: Path) -> None:
    """Files that are no byte-level tokenizer are refused with their fault."""
    path = Path(write_tokenizer(tmp_path / "tokenizer.json"))
    good = orjson.loads(path.read_bytes())

    def load(**changes: object) -> Vocabulary:
        return Vocabulary.from_json(orjson.dumps({**good, **changes}), "t.json")

    with pytest.raises(BootError, match=r"t\.json: is no tokenizer\.json"):
        Vocabulary.from_json(b"[]", "t.json")
    with pytest.raises(BootError, match="byte-level"):
        load(decoder={"type": "Metaspace"})
    with pytest.raises(BootError, match="'漢' is not byte-level"):
        load(model={**good["model"], "vocab": {"漢": 900}})
    vocab = {token: id_ for token, id_ in good["model"]["vocab"].items() if token != "A"}
    with pytest.raises(BootError, match="byte 0x41"):
        load(model={**good["model"], "vocab": vocab})


@given(
    st.lists(
        st.sampled_from([0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xEF, 0xBF, 0xBD])
    )
)
def test_bytes_decode_as_the_whole_of_them(codec: Codec, raw: list[int]) -> None:
    """What is held is decoded as one, though no byte is decoded twice."""
    detokenizer = Detokenizer(codec.vocabulary)
    held = shown = b""
    for byte in raw:
        held += bytes([byte])
        text = held.decode("utf-8", "replace")
        whole = byte < 0x80 or not text.endswith("\ufffd")
        assert detokenizer.push(codec.vocabulary._bytes[byte]) == (text if whole else "")
        shown, held = (shown + held, b"") if whole else (shown, held)


def test_halves_are_decoded_once(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come in a row: both decoders would go over all of them again at each."""
    (half,), (letter,) = codec.vocabulary.spell("é")[:1], encode(codec, "a")
    exchange = open_chat(codec, thinking={"type": "disabled"}, stream=True)
    pushed: list[int] = []
    push = Wire._push

    def noted(wire: Wire, chunk: Any) -> list[str]:
        pushed.append(len(chunk.token_ids or ()))
        return push(wire, chunk)

    monkeypatch.setattr(Wire, "_push", noted)
    frames = drive(exchange, [[half]] * 300 + [[letter]])

    assert message(chunks(frames))["content"] == "\ufffd" * 300 + "a"
    assert pushed == [0, 301, 0]  # the beginning, all tokens, the end
