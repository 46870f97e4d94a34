"""The prompts of a job and the order in which steps draw them."""
