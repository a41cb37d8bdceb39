"""Fixtures of the gateway's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import ModelInfo
from tests.gateway.support import make_info, save_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def info(tokenizer_path: Path) -> ModelInfo:
    return make_info(tokenizer_path)
