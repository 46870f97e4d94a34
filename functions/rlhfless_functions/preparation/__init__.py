"""The preparation stage: `stage` turns complete groups into the learner's input.

- `reward_groups`: groups as rewards get them. `passes`: ask the `models` (policy, reference, critic). `chunk_metrics`:
  count.
"""
