"""The records that a driver writes into a job's folder, and that reports and drivers read.

- `folder`: the layout of the folder. `status`: the job's status. `journal`: a step's batch, and files with a line a
  step. `record`: those lines. `metric_catalogue`: the meaning of every metric.
- `progress`: the present stage of a run. `forecast`: the time and cost until its end. `barren_steps`: steps with
  nothing to learn from. `mismatch`: steps whose engine and learner disagree.
  `settings_history`: the settings that each step was learnt with. `input_digests`: the files that the job reads, and
  their changes.
"""
