"""The engine: DeepSeek-V4 and V4.1 on one GPU or on the CPU, token ids only.

Importing this package loads no torch: only the contract is imported at once, the rest on first use.
"""

from pathlib import Path

from engine.api import (
    EngineDeadError,
    EngineError,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)

#: Folder of the tiny V4.1 checkpoint that ships with the package.
TINY_CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny"

__all__ = [
    "TINY_CHECKPOINT",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "ModelInfo",
    "PromptTooLongError",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprob",
    "Usage",
]
