"""Pools of GPUs that jobs share: pure functions, in one vocabulary for both kinds of pools.

A *slot* is a GPU of a pool that the instances of its jobs use one after the other. An instance that uses its slots now
is their *holder*, and so is its job. A *turn* is the time for which a task, or a job, may use slots.

- In a pool with a `deviceClass`, pods sleep between their tasks. A slot changes hands in the seconds that sleeping and
  waking take, so each task has a turn of its own: `turns`. `shortage` says when one more pod starts, `host_memory` when
  one ends, and `division` divides the slots among namespaces.
- In a pool without one, slots are *whole GPUs*: pods do not sleep, and hold their slots until they end. To change hands
  costs a drain and a start. Where that is expensive, a job has a turn of many tasks: `whole_gpus`. The instances of the
  jobs whose turn it is share the slots: `sharing`.

In both, `contention` tells a job's plans how much the other jobs want, and `decayed_sum` keeps the use of a job lately.
`placement` says where pods go. `shared_gpus` are the slots that one job's stages use in turns.
"""
