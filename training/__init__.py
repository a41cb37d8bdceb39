"""How the shipped tiny checkpoint is made: dialogues, tokenizer, training, evaluation.

Not part of the wheel. Every module is run from the repository root as `python -m training.NAME`.
"""
