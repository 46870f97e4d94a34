"""The engines that compute tokens.

- `base`: their interface. `choice`: select one.
- `transformers`: ours on plain transformers models. `vllm/`: on vLLM. `emulated`: an emulated GPU, which follows a
  trace.
- Ours: `continuous_batch` with its `admission`, `batch_rows`, `kept_rows` (of an earlier run), `kv_cache`,
  `prefill`, `passes`, `attention` and `memory`. `pass_graphs`: launch a pass
  on a GPU at once. `trial`: its passes beside a model's own when it is first loaded.
- `transformers` and `vllm/` draw tokens by `sampling`, with the `randomness` and `seeds` of a sample, and end at
  `stop_strings`.
"""
