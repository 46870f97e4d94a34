"""The names under which a job pays: its stages, and the servers of its environment."""

from typing import Literal, get_args

from rlhfless_functions.api import Stage

Charged = Literal[Stage, "environment"]
"""A stage, or the environment whose servers the job runs. No task is sent to these; samples act in them."""
CHARGED: tuple[Charged, ...] = get_args(Charged)
"""In the order of a step, the environment last."""
