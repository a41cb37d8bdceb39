"""HTTP in front of the parsers and a backend."""

__version__ = "0.1.0"
