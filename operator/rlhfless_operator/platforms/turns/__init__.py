"""Jobs that use the slots of a pool in turns; `planner/pools` has the words.

- `turn_taking`: the pods of a job that sleep between their tasks. `slot_pool`: the slots of a namespace and the jobs on
  them, as `slot_users` describes them. `slot_division` and `slot_claims`: the ResourceClaims that are the slots.
- `whole_gpus`: a pool whose pods do not sleep, and its jobs.
"""
