"""Asynchronous systems in discrete events.

- `compare`: tune and compare all systems. `systems` has them as data.
- `rollouts`: run ours on a scenario. `job` has its events, `live_job` its generation in batches that live, and
  `live_plans` its splits of the instances.
- `streaming`: run the other systems, whose groups stream to the learner.
- `long_run`: the steady pace of ours, by a plan. `shares_job` gives each share of the plan an actor.
- `bound`: the least time that any system needs.
- `work`: groups, steps and the outcome of a run.
"""
