"""How the tiny checkpoint is made: data, tokenizer, training, evaluation. Not shipped in the wheel."""
