"""The preparation stage: `stage` turns complete groups into the learner's input.

`reward_groups` calls the rewards, `passes` asks the `models` (reference, critic), and `chunk_metrics` counts.
"""
