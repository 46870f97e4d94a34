"""The files that a driver writes into a job's folder.

- `step_journal`: steps, and the job's status. `finished_step`: the record and status of a finished step.
  `write_behind`: write in the background.
- `async_journal`: rollouts and batches of an asynchronous job. `begun_job`: the document that the job was last driven
  with. `inputs`: the files that the document names.
- `ledger`: instance-seconds and money. `budget`: whether the next step fits the budget.
- `run_folder`: claim the folder. `lease`: one driver a job. `garbage`: remove artifacts that are no longer needed.
  `older_checkpoints`: those that serve if the newest is damaged.
- `samples`: responses for people to read. `tracking`: metrics for TensorBoard, Weights & Biases and MLflow. `summary`:
  the result of a job.
"""
