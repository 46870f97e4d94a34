"""The data of a job: datasets, rollouts, traces.

- `dataset_files` and `rows`: read a user's files. `datasets`: convert them to token ids. `left_out`: count unusable
  rows.
- `prompts` and `prefix_tree`: the published prompts, and the prefixes that they share.
- `rollouts`, `estimates`, `traces` and `draft_history`: the files that a step writes. `parquet`: read and write all of
  them.
"""
