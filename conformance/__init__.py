"""Conformance suite: knows endpoints only, imports nothing else of this project."""
