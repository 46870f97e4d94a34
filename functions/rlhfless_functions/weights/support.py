"""The models that can be trained, told from their configuration alone, before anything large is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights.row_bits import EXPERTS

_OTHER_INPUTS = ("vision_config", "audio_config", "video_config", "speech_config")
_ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")
"""Decoders whose configuration has an `is_decoder` that their code never reads: Pythia's says false."""


def check_supported(config: PreTrainedConfig, uri: str) -> None:
    """Refuse a model that is not a text-to-text decoder with plain weights.

    Args:
        config: configuration in the folder at `uri`.
        uri: for messages.

    Raises:
        TaskError: `model_unloadable`, with the reason and the remedy.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        _refuse(uri, f"holds an encoder-decoder model ({kind})", "give a decoder-only model")
    if others := [name for name in _OTHER_INPUTS if getattr(config, name, None) is not None]:
        _refuse(
            uri,
            f"holds a {kind} model that reads more than text ({', '.join(others)})",
            "give its language model alone, as a folder of its own",
        )
    looks_ahead = getattr(config, "is_decoder", None) is False and kind not in _ALWAYS_CAUSAL
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or looks_ahead:
        _refuse(uri, f"holds no causal language model ({kind})", "give a decoder-only model that transformers knows")
    if getattr(config, "quantization_config", None) is not None:
        _refuse(uri, "holds quantized weights, which cannot be trained", "give plain ones")


def check_weights_format(folder: Path, uri: str) -> None:
    """Refuse pickled weights: they can be neither mapped into memory nor checked before they are read.

    Raises:
        TaskError: `model_unloadable`, with the command that converts them.
    """
    if any(folder.glob("*.safetensors")):
        return
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern)):
        _refuse(
            uri,
            f"has its weights in {pickles[0]} and none as safetensors",
            "convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
        )


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence in tokens, prompt and response together, at which a model's numbers mean the same in
    every function. None if the architecture has no limit.

    The frequencies of a "longrope" model jump at its original length, for the whole sequence at once: tokens that were
    sampled before the jump would have other log-probabilities after it.

    Args:
        config: configuration of the model's text part.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    limits = [
        parameters["original_max_position_embeddings"]
        for parameters in _rope_parameters(config)
        if parameters.get("rope_type") == "longrope"
    ]
    return min([*limits, *([] if positions is None else [positions])], default=None)


def kernels(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments that make transformers compute a model as its authors define it, and experts alike in every
    batch.

    Scaled dot-product attention, the default, silently leaves out soft-capping (Gemma 2).
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"experts_implementation": EXPERTS, **({"attn_implementation": "eager"} if capped else {})}


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield all of the model's parameters of rotary positions, of which it may have some for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in given:
        yield given
    yield from (value for value in given.values() if isinstance(value, dict))


def _refuse(uri: str, what: str, remedy: str) -> None:
    raise TaskError("model_unloadable", f"{uri} {what}: {remedy}")
