"""Requests to the instances.

- `builder`: make the requests. `rehearsal`: the emulated GPUs in them. `tasks`: send a request, and retry it.
"""
