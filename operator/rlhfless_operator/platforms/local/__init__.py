"""Functions as processes on this machine.

- `platform`: start and end instances by demand, and send tasks to them.
- `process`: one instance: its state and its signals. `fork_server`: the process that instances are forked from.
- `shelter`: the process that keeps episodes while actors are let go.
- `environment_server`: the process of an environment's server, which the job runs.
- `gpus`: this machine's GPUs as slots. `turns`: the input of a decision about turns on them.
"""
