"""Host decisions in plain Python: what a step runs and which blocks it may write. No torch here."""
