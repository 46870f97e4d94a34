"""The planner: pure functions that decide, without I/O and without a clock.

- `step/`: plan a step: the number of actors, the samples of each, and a forecast of the whole step.
- `moves/`: move unfinished samples to other actors, and switch actors to newer weights.
- `groups/`: choose the groups that a step learns from.
- `stage_instances`: give the instances of a stage to actors, those of earlier steps first.
- `pools/`: share GPUs among jobs.
- `prefixes`, `prefix_choice`: choose the prompt prefixes that one actor computes for all.
- `warming`: start instances ahead of their work, and release those without work.
- `lengths`, `prompt_trend`: predict response lengths, of a prompt never seen by its own length.
- `acting`: predict how long samples are with their environments, and what they are given.
- `latency/`: model the time of an instance. `memory`: count the memory of each stage.
- `history`: keep values of earlier steps.
"""
