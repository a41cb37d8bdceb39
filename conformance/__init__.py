"""Conformance suite: knows endpoints only, imports nothing else of this project."""

from conformance.load import load_cases
from conformance.runner import run

__all__ = ["load_cases", "run"]
