"""The model, its configuration maths, checkpoints and number formats."""
