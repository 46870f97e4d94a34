"""Runs of the functions on this machine.

- `local_run`: `rlhfless run`, with `view` for the terminal and `gpu_assignment` for the GPUs.
- `replay`, `export`, `probe` (with `probe_view`), `try_reward` and `try_environment`: the work of the commands of these
  names.
- `lone_learner`: one learner without a job that runs, for `replay` and `export`.
- `served_environment`: runs the server of a job's environment meanwhile.
- `data_check`: the work of `rlhfless validate --data`.
- `functions_process`: asks the functions something in a process of their own.
"""
