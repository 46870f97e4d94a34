"""The learning stage: `learner` makes the next version of the weights from a batch.

- `step` takes a step on the `trained_models`, with the `batch`, its `pieces`, the `state` and the `optimizers`; its
  result is the `step_report` and the `step_metrics`.
- `checkpoints` and `offload` keep the state. `outputs` writes versions; `version_publisher` writes a `held_version`
  beside the next step.
- `meeting`, `team` and `rank_process` are learning in several processes. `request_checks` refuses bad requests.
"""
