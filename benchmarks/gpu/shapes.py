"""Random models in the shapes of known ones, and how much the GPU benchmark does with each."""

import json
import random
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.learner.batches import SAMPLES_PER_PROMPT

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LORA_ALPHA = 32


@dataclass(frozen=True)
class Shape:
    """A decoder of Qwen2's architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the output layer is the embedding."""


@dataclass(frozen=True)
class Work:
    """A training step of a shape, the same for all frameworks."""

    prompts: int
    """Of a step, with eight samples each."""
    prompt_tokens: int
    response_tokens: int
    """Of every response: a random model as good as never ends one before."""
    micro_batch: int
    """Samples of a forward and backward pass."""
    steps: int
    """That are taken."""
    learner_tokens: int
    """Tokens of a pass where nothing but the learner is on the device."""
    lora_rank: int | None = None
    """Where all weights with AdamW don't fit one GPU."""
    checkpointing: bool = False
    """Whether activations are computed again in the backward pass."""

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * SAMPLES_PER_PROMPT


_TINY = Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, vocabulary=1024, tied=True)
SHAPES = {
    "tiny": _TINY,
    "tiny-lora": _TINY,
    "small": Shape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=768, vocabulary=16_384, tied=True),
    # Those of Qwen2.5.
    "0.5b": Shape(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocabulary=151_936, tied=True),
    "3b": Shape(hidden=2048, layers=36, heads=16, kv_heads=2, intermediate=11_008, vocabulary=151_936, tied=True),
    "7b": Shape(hidden=3584, layers=28, heads=28, kv_heads=4, intermediate=18_944, vocabulary=152_064, tied=False),
}
_TINY_WORK = Work(prompts=2, prompt_tokens=16, response_tokens=16, micro_batch=8, steps=4, learner_tokens=512)
WORK = {
    "tiny": _TINY_WORK,
    "tiny-lora": replace(_TINY_WORK, lora_rank=4, checkpointing=True),
    "small": Work(prompts=4, prompt_tokens=64, response_tokens=48, micro_batch=8, steps=5, learner_tokens=2048),
    "0.5b": Work(prompts=16, prompt_tokens=256, response_tokens=256, micro_batch=16, steps=5, learner_tokens=16_384),
    "3b": Work(
        prompts=8,
        prompt_tokens=256,
        response_tokens=256,
        micro_batch=16,
        steps=4,
        learner_tokens=16_384,
        checkpointing=True,
    ),
    "7b": Work(
        prompts=8,
        prompt_tokens=256,
        response_tokens=128,
        micro_batch=16,
        steps=4,
        learner_tokens=16_384,
        lora_rank=16,
        checkpointing=True,
    ),
}


def model_settings(folder: Path, dtype: str, lora_rank: int | None) -> dict[str, Any]:
    """Fields of `ModelSettings`, as a job document has them.

    Args:
        folder: of the model.
        dtype: `float32` or `bfloat16`.
        lora_rank: of the adapter on all linear layers; None to train all weights.
    """
    settings: dict[str, Any] = {"source": str(folder), "dtype": dtype}
    return settings | ({"lora": {"rank": lora_rank, "alpha": float(LORA_ALPHA)}} if lora_rank else {})


def make_model(shape: Shape, dtype: "torch.dtype", device: "torch.device", *, seed: int) -> "PreTrainedModel":
    """A model with random weights, made where it is to be: on a CPU billions of random numbers take minutes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    with device:
        return Qwen2ForCausalLM._from_config(config, dtype=dtype).eval()


def save_tokenizer(shape: Shape, folder: Path) -> None:
    """A tokenizer of the architecture's own kind, in which each letter is a token and all others are words."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    known = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [*known, *(f"w{token}" for token in range(len(known), shape.vocabulary))]
    vocabulary = {word: token for token, word in enumerate(words)}
    special = {"unk_token": "<pad>", "pad_token": "<pad>", "eos_token": "<eos>"}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], **special).save_pretrained(folder)


def save_model(shape: Shape, folder: Path, dtype: "torch.dtype", device: "torch.device") -> None:
    """A model's folder as its user would have it: no manifest, and so no checksums."""
    from rlhfless_functions.weights.saving import write_model

    folder.mkdir(parents=True)
    write_model(make_model(shape, dtype, device, seed=0), folder, dtype)
    save_tokenizer(shape, folder)


def save_prompts(work: Work, path: Path) -> None:
    """As many prompts as a step has, as JSON lines; they differ from their first tokens on."""
    draw = random.Random(0)
    rows = [
        json.dumps({"prompt": "".join(draw.choices(string.ascii_lowercase, k=work.prompt_tokens))})
        for _ in range(work.prompts)
    ]
    path.write_text("\n".join(rows) + "\n")
