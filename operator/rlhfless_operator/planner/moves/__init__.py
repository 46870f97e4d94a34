"""Moves of unfinished samples to other actors.

- `migration`: follow the actors of a step, and apply a rule to them.
- `live_batches`: let groups join batches that live, and empty some for others.
- `live_sizes`: say how many actors live, and how many samples the batch of each may have.
- `rules`: decide when a move is worth its cost. The rules of RLHFless and Laminar, and ours.
"""
