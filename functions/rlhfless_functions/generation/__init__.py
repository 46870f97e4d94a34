"""The generation stage: `stage` samples a share of responses.

- `live_batch`: the batch of a request, which lines of its body change. `batch_counts`: its counts. `live_versions`: the
  samples and weights that go together there. `orders`: the lines, and what is read and opened for them.
- `share`: the samples of one sink. `reading`: what they need from the store. `resumption`: samples of earlier attempts.
  `rollout_files`: publish samples.
- `turns/`: responses of several turns, which an environment answers.
- `prefetching`: fetch the next weights while the engine decodes. `prefix_exchange`: send and fetch shared prefixes.
- `engines/`: compute tokens. `drafting/`: guess tokens, which one pass verifies. `early_exit/`: measure how well a
  model's first layers guess.
"""
