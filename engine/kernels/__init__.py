"""Kernels, each with a torch twin in reference.py."""
