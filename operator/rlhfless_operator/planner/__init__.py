"""The planner: pure functions that decide, without I/O and without a clock.

- `step/`: how many actors a step gets, which samples each of them, and what the whole step will take and cost.
- `moves/`: when unfinished samples move to another actor, and when a job switches to newer weights.
- `history`: what the planner keeps of earlier steps.
- `latency/`: how long an instance takes, by its tables and by what a job measured.
- `lengths`: how long a prompt's responses will be.
- `groups/`: which groups a step learns from.
- `pools/`: how jobs share GPUs.
- `stage_instances`: which actors have an instance, where rollouts overlap.
- `prefixes`, `prefix_choice`: which beginnings of prompts are computed once.
- `warming`: when instances start ahead of their work.
"""
