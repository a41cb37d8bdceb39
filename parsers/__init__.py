"""Sans-IO protocol core: request bytes to prompt ids, token ids to wire bytes."""
