"""Measurements; not shipped. Each module writes rows of JSON with the command that made them."""
