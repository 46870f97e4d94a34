"""The engine on vLLM.

- `engine`: the interface's implementation. `run`: the run of one share.
- `installation` and `importing`: find and import vLLM. `arguments` and `starting`: start it. `compiled_code`: reuse its
  compiled code. `arriving`: start it while weights arrive.
- `extension` and `worker` are in vLLM's own processes: `draws` and `verification` sample there.
- `adapters`, `prefixes`, `salts`, `drafting`, `sleep` and `limits` are one feature each. `graphs` captures CUDA
  graphs for passes with drafts.
"""
