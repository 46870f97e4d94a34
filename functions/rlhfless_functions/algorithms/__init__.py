"""The mathematics of reinforcement learning, as functions of tensors.

`advantages`, `ratios`, `kl` and `losses` compute per token, `aggregation` makes one number of them, `objectives` joins
them as a job's settings say, and `diagnostics` are the statistics beside them.
"""
