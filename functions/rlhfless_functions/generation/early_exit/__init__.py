"""Early exit: how well a model's first layers guess what the whole model draws.

`readouts` measures each of the `layers`, `self_drafting` drafts with them, and `suitability` and `draft_speed` sum up.
"""
