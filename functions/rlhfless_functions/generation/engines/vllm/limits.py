"""Limits of exact sampling in vLLM."""

from collections.abc import Sequence

from transformers import PretrainedConfig

from rlhfless_functions.generation.engines.base import Growth, SequenceTask, check_prompt
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling

LEAST_TEMPERATURE = 0.01
"""Least temperature above 0. vLLM raises lower ones to it."""
_KEY_VALUE_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""Names under which vLLM looks for the number of heads of keys and values, in every architecture's configuration."""


def check_config(config: PretrainedConfig, uri: str) -> None:
    """Refuse a configuration of which vLLM reads what the architecture does not.

    GPT-NeoX has as many heads of keys and values as of queries, whatever else its configuration says. vLLM would share
    them among queries, and sample from another model.

    Args:
        config: configuration of the weights at `uri`.

    Raises:
        TaskError: `model_unloadable`; the message names the field.
    """
    text = config.get_text_config()
    of_architecture = type(text)()
    for name in _KEY_VALUE_HEADS:
        heads = getattr(text, name, None)
        if heads is None or hasattr(of_architecture, name):
            continue
        if heads != text.num_attention_heads:
            raise TaskError(
                "model_unloadable",
                f"{uri} has {name}: {heads} in its config.json, which {text.model_type} does not have and vLLM would"
                " use; remove it there, or set generation.engine to transformers",
            )


def check_tasks(
    tasks: Sequence[SequenceTask], sampling: EngineSampling, positions: int, growth: Growth | None = None
) -> None:
    """Refuse a share that cannot be sampled exactly.

    Args:
        tasks: the share.
        sampling: the job's settings.
        positions: most tokens of a sequence in this engine.
        growth: the most that it may grow to, if it grows.

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
    prompts = {f"prompt {task.prompt}": len(task.prompt_tokens) for task in tasks}
    if growth is not None:
        prompts["the longest prompt"] = growth.prompt_tokens
    for name, tokens in prompts.items():
        if tokens + sampling.max_response_tokens > positions:
            raise TaskError(
                "bad_request",
                f"{name} has {tokens} tokens; together with sampling.maxResponseTokens"
                f" ({sampling.max_response_tokens}) that is more than the model's {positions} positions; lower"
                " sampling.maxResponseTokens, lower sampling.maxPromptTokens to drop the prompt, or raise"
                " generation.vllm.maxModelLen if it is less than the model's positions",
            )
