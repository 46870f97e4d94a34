"""Responses of several turns, which an environment answers.

- `conversations`: the samples of a share that are away, and those that come back into the batch.
"""
