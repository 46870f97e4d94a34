"""Limits of exact sampling in vLLM."""

from collections.abc import Sequence

from rlhfless_functions.generation.engines.base import SequenceTask, check_prompt
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling

LEAST_TEMPERATURE = 0.01
"""Least temperature above 0. vLLM raises lower ones to it."""


def check_tasks(tasks: Sequence[SequenceTask], sampling: EngineSampling, positions: int) -> None:
    """Refuse a share that cannot be sampled exactly.

    Args:
        tasks: the share.
        sampling: the job's settings.
        positions: most tokens of a sequence in this engine.

    Raises:
        TaskError: the message names the first fault.
    """
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise TaskError(
            "bad_request",
            f"sampling.temperature ({sampling.temperature}) is below {LEAST_TEMPERATURE}, and vLLM would sample at"
            " that instead; raise it, or set generation.engine to transformers",
        )
    for task in tasks:
        check_prompt(task)
        if len(task.prompt_tokens) + sampling.max_response_tokens > positions:
            raise TaskError(
                "bad_request",
                f"prompt {task.prompt} has {len(task.prompt_tokens)} tokens; together with sampling.maxResponseTokens"
                f" ({sampling.max_response_tokens}) that is more than the model's {positions} positions; lower"
                " sampling.maxResponseTokens, lower sampling.maxPromptTokens to drop the prompt, or raise"
                " generation.vllm.maxModelLen if it is less than the model's positions",
            )
