"""The learning stage: `learner` makes the next version of the weights from a batch.

- `step`: take a step. It uses the `trained_models`, the `batch` and its `pieces`, the `state` and the `optimizers`.
- `step_report` and `step_metrics`: the result of a step.
- `checkpoints` and `offload`: keep the state; `host_copy`: while another has the device. `outputs`: publish
  versions. `version_publisher`: publish a `held_version` beside the next step.
- `meeting`, `team` and `rank_process`: learn in several processes. `request_checks`: refuse bad requests.
"""
