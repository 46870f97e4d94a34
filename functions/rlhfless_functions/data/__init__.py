"""The data of a job: datasets, rollouts, traces.

- `dataset_files` and `rows`: read a user's files. `sources`: find the files of a folder, pattern or split. `hub`: read
  from the Hugging Face hub. `row_functions`: apply the user's `map` and `filter`.
- `chats`: make a prompt as the model reads it. `thoughts`: the thoughts that a prompt begins. `datasets`: convert rows
  to token ids. `left_out`: count unusable rows. `lost_characters`: name characters that the tokenizer does not know.
- `code_tests/`: the tests that the code reward runs.
- `prompts` and `prefix_tree`: the published prompts, and the prefixes that they share.
- `turns`: the turns of a response in a trace.
- `rollouts`, `estimates`, `traces` and `draft_history`: the files that a step writes. `parquet`: read and write all of
  them.
"""
