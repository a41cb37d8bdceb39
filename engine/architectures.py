"""Which of the architectures that are served a checkpoint is; knows nothing of tensors."""

from __future__ import annotations

from pathlib import Path

import orjson

from engine.config import ModelConfig
from engine.qwen3_config import ARCHITECTURE, Qwen3Config

AnyConfig = ModelConfig | Qwen3Config


def read_config(path: Path | str) -> AnyConfig:
    """Read config.json, or the config.json of a folder.

    Args:
        path: of either.

    Raises:
        ConfigError: the file is absent, is no JSON object, or cannot be served.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        data = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        data = None  # named by the reader below
    if isinstance(data, dict):
        architectures = data.get("architectures") or ()
        if ARCHITECTURE in architectures or data.get("model_type") == "qwen3_moe":
            return Qwen3Config.from_file(path)
    return ModelConfig.from_file(path)
