"""The generation stage: `stage` samples a share of responses.

- `share`: the work of one request. `resumption`: samples of its earlier attempts. `rollout_files`: publish its samples.
- `live_batch`: the work of a request whose body stays open. `live_versions`: the weights that go together there.
  `reading`: what a share needs from the store.
- `turns/`: responses of several turns, which an environment answers.
- `prefetching`: fetch the next weights while the engine decodes. `prefix_exchange`: send and fetch shared prefixes.
- `engines/`: compute tokens. `drafting/`: guess tokens, which one pass verifies. `early_exit/`: measure how well a
  model's first layers guess.
"""
