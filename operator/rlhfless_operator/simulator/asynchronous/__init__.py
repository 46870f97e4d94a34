"""Asynchronous systems in discrete events.

- `compare`: tune and compare all systems. `systems` has them as data.
- `rollouts`: run ours on a scenario. `job` has its events, `live_job` those of batches that live, and `live_plans` the
  plans of both.
- `streaming`: run the other systems, whose groups stream to the learner.
- `long_run`: the steady pace of ours.
- `bound`: the least time that any system needs.
- `work`: groups, steps and the outcome of a run.
"""
