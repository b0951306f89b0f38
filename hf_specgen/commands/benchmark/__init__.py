"""Speculative against plain and stock assisted generation, measured in one run."""
