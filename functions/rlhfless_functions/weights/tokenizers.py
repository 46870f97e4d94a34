"""The tokenizer that belongs to a model."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights.source import load_config, model_revision, read_config, unloadable, weights_folder

# Without one of these, transformers makes an empty tokenizer of the model's kind.
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(model: ModelSettings, ref: WeightsReference, weights: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer: `model.tokenizer`'s if given, else the one in the weights' folder, with the job's template.

    Args:
        model: the job's model.
        ref: the weights that the tokenizer is for.
        weights: a local folder with all files of the weights except the tensors, if it is known.

    Raises:
        TaskError: it can't be had, or has tokens that the model does not know.
    """
    uri = model.tokenizer or ref.uri
    if weights is not None and uri == ref.uri:
        folder = weights
    else:
        folder = weights_folder(uri, revision=model_revision(model, uri), verify=False)
    with unloadable(uri, "give model.tokenizer: a folder with tokenizer.json and tokenizer_config.json"):
        if not any(file for pattern in _VOCABULARIES for file in folder.glob(pattern)):
            raise FileNotFoundError("there is no tokenizer in it")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if model.chat_template is not None:
        tokenizer.chat_template = _template(model.chat_template)
    if weights is not None:
        check_vocabulary(tokenizer, read_config(weights, ref.uri))
    else:
        check_vocabulary(tokenizer, load_config(ref.uri, revision=model_revision(model, ref.uri)))
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuse a tokenizer with tokens beyond the model's embedding. More embeddings than tokens are mere padding.

    Raises:
        TaskError: the message names both sizes.
    """
    rows = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise TaskError(
            "model_unloadable",
            f"vocabulary mismatch: the tokenizer has token ids up to {largest}, the model's embedding has {rows} rows;"
            " give model.tokenizer the tokenizer that the model was trained with, or resize the model's embedding",
        )


def _template(given: str) -> str:
    """Return the template itself, or the content of the file that it names: a template has braces or line breaks."""
    if "{" in given or "\n" in given:
        return given
    with store_errors():
        return artifacts.read_bytes(given).decode()
