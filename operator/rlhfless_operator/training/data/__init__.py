"""The data of a job.

- `prompts`: the prompts, and those that come next. `cursor`: the position in their order.
"""
