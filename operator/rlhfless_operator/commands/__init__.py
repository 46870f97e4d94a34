"""The commands of `rlhfless`, a file each: their options, and the little that joins them to the packages below.

A command imports what it runs when it runs, so that `rlhfless --help` answers at once.

- Jobs: `run`, `validate`, `try_reward`, `try_environment`, `convert`, `plan`, `simulate`.
- Runs: `report`, `compare`, `sample`, `export`, `replay`, `probe`.
- Clusters: `operator`, `preflight`, `crd`, `reference`.
- `options`: the options that several commands share. `exits`: the exit with a message and a status.
"""
