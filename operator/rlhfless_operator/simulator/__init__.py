"""The simulator: the planner's decisions in discrete events, without GPUs.

- `scenarios`, `hardware` and `traces` say what is simulated; `policies` are the systems that are compared, and
  `global_ratio` is the rule of one of them.
- `steps` runs a job step by step: `generation` and `instance` are its generation stage, `foresight` the lengths that a
  policy expects, `step_bound` the least that any policy needs.
- `simulate` runs policies on scenarios, `assumptions` change a scenario, and `page` shows the results.
- `forecast`, `job_forecast` and `plan_view` tell before a run what a typical step takes and costs.
- `asynchronous/`: the same for jobs that generate ahead of their learner.
"""
