"""An instance as an HTTP server.

- `instance`: start it. `server`: answer requests. `live_lines`: read a body that stays open. `function`: run tasks.
- `fork_server`: fork local instances.
- `preload`: the model that a new pod loads. `caches`: the folders for downloads and compiled code.
- `emulation`: all three functions on emulated GPUs.
- `probe`, `sample`, `try_reward` and `try_environment`: answer the commands with these names.
- `check_data`: answers `rlhfless validate --data`.
"""
