"""Environments: what answers a response's turns.

- `episodes`: the seam between generation and environments.
"""
