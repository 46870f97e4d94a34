"""The layers of a model: find them and the norm after the last, read out their outputs, and run the model with fewer
layers."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhfless_functions.model.output_head import check_output_logits, sampled_logits
from rlhfless_functions.runtime.task import TaskError

_TOKENS = 8
"""Names by which the final norm is found."""


@dataclass(frozen=True)
class ExitLayers:
    """The decoder layers of a model, and the way from any layer's output to logits."""

    model: PreTrainedModel
    path: Sequence[str]
    """Names of the attributes that lead from the model to its list of layers."""
    norm: nn.Module
    """The norm between the last layer and the head."""

    @property
    def layers(self) -> nn.ModuleList:
        """The layers in their order."""
        found: Any = self.model.get_submodule(".".join(self.path))
        return found  # type: ignore[no-any-return]

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of a layer's output: [rows, hidden size] to float32 [rows, vocabulary]."""
        return sampled_logits(self.model, self.norm(hidden))

    @contextmanager
    def watched(self, see: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """Show the output of each layer, [batch, tokens, hidden size], during the passes of the block.

        Args:
            see: called with the layer's number, from 0, and its output.
        """
        with ExitStack() as hooks:
            for number, layer in enumerate(self.layers):
                handle = layer.register_forward_hook(
                    lambda module, inputs, output, number=number: see(number, _tensor(output))
                )
                hooks.callback(handle.remove)
            yield

    def until(self, layer: int) -> PreTrainedModel:
        """Return a model that ends after so many layers and shares all tensors with the whole model."""
        shorter = self.model
        for depth in reversed(range(len(self.path))):
            inner: Any = self.layers[:layer] if depth == len(self.path) - 1 else shorter
            outer: Any = self.model.get_submodule(".".join(self.path[:depth]))
            shorter = copy.copy(outer)
            shorter._modules = {**outer._modules, self.path[depth]: inner}
        return shorter


@torch.inference_mode()
def find_layers(model: PreTrainedModel, uri: str) -> ExitLayers:
    """Find the layers of a causal language model of transformers, by passing a few tokens through it.

    Args:
        model: in evaluation mode.
        uri: for messages.

    Raises:
        TaskError: `model_unloadable`: its layers, final norm or head can't be found.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if not lists or wanted < 1:
        _refuse(uri, model, f"no list of its {wanted} layers")
    # The outermost list comes first: a layer may have as many experts as the model has layers.
    path = lists[0].split(".")
    if model.get_output_embeddings() is None:
        _refuse(uri, model, "no head")
    norm = _final_norm(model, path)
    if norm is None:
        _refuse(uri, model, "no final norm")
    try:
        check_output_logits(model)
    except ValueError as error:
        raise TaskError("model_unloadable", f"{uri}: {error}") from error
    return ExitLayers(model, path, norm)


def _final_norm(model: PreTrainedModel, path: Sequence[str]) -> nn.Module | None:
    """Return the module that gets the last layer's output and returns the model's last hidden state."""
    owner = model.get_submodule(".".join(path[:-1]))
    seen: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and torch.is_tensor(inputs[0]) and torch.is_tensor(_tensor(output)):
            seen[module] = inputs[0], _tensor(output)

    layers: Any = model.get_submodule(".".join(path))
    children = [child for name, child in owner.named_children() if name != path[-1]]
    with ExitStack() as hooks:
        for module in (layers[-1], *children):
            hooks.callback(module.register_forward_hook(keep).remove)
        # Several tokens: the states of a padding token may be zeros throughout, and then every module would match.
        ids = torch.arange(min(_TOKENS, model.config.get_text_config().vocab_size), device=model.device)[None]
        last = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if layers[-1] not in seen:
        return None
    before = seen[layers[-1]][1]
    for module in children:
        if module in seen:
            given, returned = seen[module]
            if given.shape == before.shape and torch.equal(given, before) and torch.equal(returned, last):
                return module
    return None


def _tensor(output: Any) -> Any:
    """Return the hidden states in a layer's output, which has one of several forms."""
    return output[0] if isinstance(output, tuple) else output


def _refuse(uri: str, model: PreTrainedModel, lack: str) -> None:
    raise TaskError(
        "model_unloadable",
        f"{uri}: {lack} can be found in {type(model).__name__}; name a decoder with a stack of layers, a norm after"
        " them and a head, such as those of the Llama, Qwen, Gemma, Mistral, Phi or GPT-2 families",
    )
