"""Everything that holds tensors between steps."""
