"""TRL's trainers of a tiny model, which the algorithms are compared with: nothing of them is written again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from trl import GRPOTrainer, RLOOTrainer

VOCABULARY = 13
LONGEST = 9
GROUP = 4
SAMPLES = 8
"""Two groups in a batch; TRL cuts it into two micro-batches of four."""


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return Qwen3ForCausalLM(config)


def is_grpo(trainer: GRPOTrainer | RLOOTrainer) -> bool:
    from trl import GRPOTrainer

    return isinstance(trainer, GRPOTrainer)


def trainer_of(kind: type[Any], config_of: type[Any], folder: Path) -> Any:
    """Make a trainer of a kind of TRL's, with its own kind of configuration."""
    from datasets import Dataset

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = config_of(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        bf16=False,
        per_device_train_batch_size=SAMPLES // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        beta=0.0,
    )
    return kind(
        model=tiny_model(),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3", "w4 w5"]}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=tokenizer,
    )


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    from trl import GRPOConfig, GRPOTrainer

    return trainer_of(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def rloo(tmp_path_factory: pytest.TempPathFactory) -> RLOOTrainer:
    from trl import RLOOConfig, RLOOTrainer

    return trainer_of(RLOOTrainer, RLOOConfig, tmp_path_factory.mktemp("rloo"))


@contextlib.contextmanager
def changed(target: Any, **attributes: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in attributes.items():
            patch.setattr(target, name, value, raising=False)
        yield
