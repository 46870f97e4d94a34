"""The names under which a job pays: its stages, and the servers of its environment. The functions that it runs."""

from typing import Literal, get_args

from rlhfless_functions.api import Stage

Charged = Literal[Stage, "environment"]
"""A stage, or the environment whose servers the job runs. No task is sent to these; samples act in them."""
CHARGED: tuple[Charged, ...] = get_args(Charged)
"""In the order of a step, the environment last."""
Function = Literal[Charged, "shelter"]
"""A function of a job on a cluster. The shelter keeps episodes while actors are let go, and its seconds are the
environment's."""
FUNCTIONS: tuple[Function, ...] = get_args(Function)
