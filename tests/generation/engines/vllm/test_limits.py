"""Configurations of which vLLM would read what their architecture does not. They are told without vLLM."""

import pytest
from transformers import GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from rlhfless_functions.generation.engines.vllm.limits import check_config
from rlhfless_functions.runtime.task import TaskError


def test_heads_that_the_architecture_does_not_have_are_refused_by_name() -> None:
    message = (
        r"the model has num_key_value_heads: 2 in its config\.json, which gpt_neox does not have and vLLM would use"
    )
    with pytest.raises(TaskError, match=message):
        check_config(GPTNeoXConfig(num_attention_heads=4, num_key_value_heads=2), "the model")


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(num_attention_heads=4),
        GPTNeoXConfig(num_attention_heads=4, num_key_value_heads=4),
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2),
    ],
    ids=["none", "as many", "its own"],
)
def test_other_configurations_are_taken(config: PreTrainedConfig) -> None:
    check_config(config, "the model")
