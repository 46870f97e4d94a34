"""The simulator: the planner's decisions in discrete events, without GPUs.

From the top down:

- `simulate`: run policies on scenarios. `page`: show the result. `assumptions`: change a scenario.
- `job_forecast`: forecast a step of a job, as its `question` asks, on the GPUs that `hardware` finds. `fitting`: choose
  how many of them each stage needs. `plan_view`: show the forecast.
- `steps`: run a job step by step. `generation` and `instance` are its generation stage, `own_stages` its preparation
  and learning as the loop has them, `following` those of a learner that does not wait for the batch. `foresight` has
  the lengths that a policy expects, and `step_bound` the least that any policy needs.
- `asynchronous/`: the same for jobs that generate ahead of their learner.
- `forecast`: the time and cost of a typical step.
- `policies`: the systems that are compared. `global_ratio` is the rule of one of them, `divisions` how others divide.
- `scenarios`, `traces`: the settings and the response lengths to simulate. `episode`: the turns of a response that
  acts. `acted`: what a policy has learnt of them.
"""
