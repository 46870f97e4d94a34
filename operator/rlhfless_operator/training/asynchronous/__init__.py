"""Jobs that generate ahead of their learner.

- `loop`: take the steps.
- `rollouts_ahead`: generate and prepare ahead. `free_groups`: the groups that any later step may take.
- `step_choice`: choose the groups of a step. `earlier_drivers`: the groups that earlier drivers have written down.
"""
