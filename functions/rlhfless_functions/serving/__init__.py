"""An instance as an HTTP server.

- `instance` starts it, `server` answers, `function` works. `fork_server` forks local ones. `preload` names the model
  that a new pod loads, `caches` its folders.
- `emulation` is all three functions on emulated GPUs. `probe`, `sample` and `try_reward` answer these commands.
"""
