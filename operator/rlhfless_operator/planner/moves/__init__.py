"""Moves of unfinished samples to other actors, and switches of actors to newer weights.

- `migration`: follow the actors of a step, and apply a rule to them.
- `rules`: decide when a move is worth its cost. The rules of RLHFless and Laminar, and ours.
- `switching`: decide when an actor goes on with newer weights.
"""
