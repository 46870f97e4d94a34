"""The groups that a step learns from.

- `dynamic_sampling`: draw fresh prompts in place of groups that teach nothing.
- `group_buffer`: hold the groups of an asynchronous job until a step takes them.
- `staleness`: count the versions between generation and the learner, and choose how far ahead generation goes.
"""
