"""Commands that run functions on this machine.

- `local_run`: `rlhfless run`, with `view` for the terminal and `gpu_assignment` for the GPUs.
- `replay`, `probe` (with `probe_command` and `probe_view`) and `try_reward`: the commands of these names.
- `run_commands`: the commands about a run that is there.
- `functions_process`: ask the functions something in a process of their own.
"""
