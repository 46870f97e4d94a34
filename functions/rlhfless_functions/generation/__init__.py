"""The generation stage: `stage` samples a share of responses.

- `share` is one request's work, `resumption` what earlier attempts left of it, `rollout_files` how samples leave.
- `prefetching` fetches the next weights while the engine decodes. `prefix_exchange` sends shared prefixes.
- `engines/`: what computes tokens. `drafting/`: guessed tokens that one pass verifies. `early_exit/`: how well a
  model's first layers guess.
"""
