"""Synthetic tool-calling dialogues with known right answers.

`make(seed, split)` gives one dialogue as a chat-completions body whose assistant turns are the
answers that the tiny model shall learn. The skill they teach is copying: names come from the
declared tools, values from the user's words, the final answer from the tool's result.
"""

from training.dialogues.build import Dialogue, Split, Turn, make

__all__ = ["Dialogue", "Split", "Turn", "make"]
