"""The data of a job: datasets, rollouts, traces.

- `dataset_files` and `rows` read a user's files; `datasets` makes token ids of them; `left_out` counts unusable rows;
  `prompts` and `prefix_tree` are what is published of them.
- `rollouts`, `estimates`, `traces` and `draft_history` are what a step writes. `parquet` reads and writes all of them.
"""
