"""Jobs that generate ahead of their learner.

- `loop`: take the steps.
- `rollouts_ahead`: generate and prepare ahead. `free_groups`: the groups that any later step may take.
"""
