"""The engine on vLLM.

- `engine` is the interface's implementation, `run` one share's run. `installation` and `importing` find vLLM,
  `arguments` and `starting` start it, `compiled_code` keeps its compiled code, `arriving` lets it start while weights
  come.
- `extension` and `worker` are in vLLM's own processes: `draws` and `verification` sample there.
- `adapters`, `prefixes`, `salts`, `drafting`, `sleep` and `limits` are one feature each.
"""
