"""Prompts that are computed once for all responses to them, with gradients.

The samples of a group have one prompt, which is often longer than their responses. Here it goes through the model once;
its keys and values are what every response attends to. Responses can be passed in any number of micro-batches: each
one's backward pass ends at the prompts' keys and values and adds to their gradients, and `backward` takes what has been
summed up through the prompts, once.

The numbers are those of passing each sample whole, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhfless_functions.model.packed_attention import PACKED, packed_hidden
from rlhfless_functions.model.packing import Packing, PromptStates

_KERNELS = {"sdpa", "eager", PACKED}
_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class PackedResponses:
    """The inputs of responses in one row: each without its last token, which nothing is predicted from."""

    input_ids: torch.Tensor
    """[1, tokens]."""
    lengths: list[int]
    """Tokens of each response's input that has any."""
    numbers: list[int]
    """Number of each of these responses' prompts in the block."""
    order: torch.Tensor
    """[number of response tokens] what each response token follows: the last token of the prompt of response number i
    is i, and what comes after all responses' is a token of the row."""

    @classmethod
    def of(cls, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> "PackedResponses":
        """The inputs of responses to prompts that are given by their numbers."""
        some = [(number, response[:-1]) for number, response in zip(prompts, responses, strict=True) if response[1:]]
        order, place = [], len(responses)
        for number, response in enumerate(responses):
            rest = max(0, len(response) - 1)
            order += [*([number] if response else []), *range(place, place + rest)]
            place += rest
        return cls(
            torch.tensor([[token for _, tokens in some for token in tokens]]),
            [len(tokens) for _, tokens in some],
            [number for number, _ in some],
            torch.tensor(order, dtype=torch.long),
        )


@dataclass(frozen=True)
class ResponseBatch:
    """n responses to some of a block's prompts; R is the longest."""

    prompts: torch.Tensor
    """[n] number of each response's prompt in the block."""
    response_ids: torch.Tensor
    """[n, R] token ids, right-padded."""
    response_mask: torch.Tensor
    """[n, R] bool: True on the tokens of the response, False on padding."""
    packed: PackedResponses | None = None
    """Their inputs in one row, where the prompts stand in one as well."""

    def to(self, device: torch.device) -> "ResponseBatch":
        """The same batch on another device."""
        return ResponseBatch(
            self.prompts.to(device), self.response_ids.to(device), self.response_mask.to(device), self.packed
        )


def can_share_prompts(body: PreTrainedModel) -> bool:
    """Whether a model's attention accepts explicit masks, for full or sliding-window attention."""
    config = body.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return body.config._attn_implementation in _KERNELS and kinds <= _KINDS and body.config.is_encoder_decoder is False


class SharedPrompts:
    """Keys, values and last hidden states of a block of prompts.

    Args:
        body: the transformer below the head, for which `can_share_prompts` holds.
        prompts: token ids of each, at least one prompt of at least one token.
        packed: whether the prompts are put into one row, which needs a model that is packed; so must be the batches.
    """

    def __init__(self, body: PreTrainedModel, prompts: Sequence[Sequence[int]], *, packed: bool = False) -> None:
        self._body = body
        self._sizes = [len(prompt) for prompt in prompts]
        self._lengths = torch.tensor(self._sizes, device=body.device)
        last, states = self._pass_row(prompts) if packed else self._pass_padded(prompts)
        self._computed = [last, *(state for layer in sorted(states) for state in states[layer])]
        self._shared = [
            tensor.detach().requires_grad_() if tensor.requires_grad else tensor for tensor in self._computed
        ]

    def hidden_before(self, batch: ResponseBatch) -> torch.Tensor:
        """The final hidden states that response tokens follow from, [number of response tokens, H], with autograd.

        Args:
            batch: on the model's device.
        """
        last, *states = self._shared
        if batch.packed is not None:
            return self._packed_before(last, states, batch.prompts, batch.packed)
        first = last.index_select(0, batch.prompts)[:, None]
        if batch.response_ids.shape[1] > 1:
            inputs = batch.response_ids[:, :-1]
            lengths = self._lengths.index_select(0, batch.prompts)
            positions = lengths[:, None] + torch.arange(inputs.shape[1], device=inputs.device)
            rest = self._body(
                input_ids=inputs,
                position_ids=positions,
                attention_mask=_masks(self._body.config, positions, lengths, states[0].shape[2], self._body.dtype),
                past_key_values=_Reader(states, batch.prompts),
                use_cache=False,
            ).last_hidden_state
            first = torch.cat([first, rest], dim=1)
        return first[:, : batch.response_ids.shape[1]][batch.response_mask]

    def _pass_padded(self, prompts: Sequence[Sequence[int]]) -> "_Computed":
        width = max(self._sizes)
        rows = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        device = self._lengths.device
        self._keep_cache_when_checkpointing(self._body)
        recorder = _Recorder()
        # Right-padded and causal: no prompt's numbers depend on the others.
        hidden = self._body(
            input_ids=torch.tensor(rows, device=device), past_key_values=recorder, use_cache=False
        ).last_hidden_state
        return hidden[torch.arange(len(rows), device=device), self._lengths - 1], recorder.states

    def _pass_row(self, prompts: Sequence[Sequence[int]]) -> "_Computed":
        states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        packing = Packing(self._sizes, record=states)
        hidden = packed_hidden(self._body, torch.tensor([[token for prompt in prompts for token in prompt]]), packing)
        return hidden[0, self._lengths.cumsum(0) - 1], states

    def _packed_before(
        self, last: torch.Tensor, states: Sequence[torch.Tensor], prompts: torch.Tensor, responses: PackedResponses
    ) -> torch.Tensor:
        before = last.index_select(0, prompts)
        if responses.lengths:
            known = PromptStates(self._sizes, list(zip(states[::2], states[1::2], strict=True)))
            packing = Packing(responses.lengths, known, responses.numbers)
            first = [self._sizes[number] for number in responses.numbers]
            before = torch.cat([before, packed_hidden(self._body, responses.input_ids, packing, first)[0]])
        return before.index_select(0, responses.order.to(before.device))

    def backward(self) -> None:
        """Take the gradients that the responses left at the prompts through the prompts."""
        pairs = [
            (computed, shared.grad)
            for computed, shared in zip(self._computed, self._shared, strict=True)
            if computed.requires_grad and shared.grad is not None
        ]
        if pairs:
            torch.autograd.backward([computed for computed, _ in pairs], [gradient for _, gradient in pairs])

    @staticmethod
    def _keep_cache_when_checkpointing(body: nn.Module) -> None:
        """Neither cache here minds being written twice, as happens when a layer is computed again."""
        for module in body.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module._can_checkpoint_with_cache = True


_Computed = tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]
"""Last hidden states [prompts, H], and each layer's keys and values."""


class _Recorder(Cache):
    """Keeps what each layer would have a cache keep, inside the autograd graph."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take note of [rows, heads, tokens, head size]."""
        self.states.setdefault(layer_idx, (key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing stands before a prompt."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of what attention reads."""
        return query_length, 0


class _Reader(Cache):
    """Puts the prompts' keys and values before the responses' own."""

    def __init__(self, states: Sequence[torch.Tensor], prompts: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._states = states
        self._prompts = prompts

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, heads, prompt + response tokens, head size] of what attention reads."""
        keys, values = (
            torch.cat([self._states[2 * layer_idx + which].index_select(0, self._prompts), own], dim=2)
            for which, own in enumerate((key_states, value_states))
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the responses, padding included."""
        return self._states[0].shape[2]


def _masks(
    config: PreTrainedConfig, positions: torch.Tensor, lengths: torch.Tensor, width: int, dtype: torch.dtype
) -> Any:
    """What the model takes as `attention_mask`: 4-dimensional, one for each kind of layer if it has kinds.

    Args:
        config: of the model.
        positions: [n, R] of the response tokens.
        lengths: [n] of their prompts.
        width: of the padded prompts, whose keys stand first.
        dtype: of the model, for kernels that add their mask.
    """
    text = config.get_text_config()
    keys = torch.arange(width, device=positions.device).expand(len(lengths), -1)
    places = torch.cat([keys, positions], dim=1)
    real = torch.cat([keys < lengths[:, None], torch.ones_like(positions, dtype=torch.bool)], dim=1)
    distance = positions[:, :, None] - places[:, None]
    seen = (distance >= 0) & real[:, None]

    def mask(visible: torch.Tensor) -> torch.Tensor:
        if config._attn_implementation == "sdpa":
            return visible[:, None]
        least = torch.finfo(dtype).min
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, least)[:, None]

    window = getattr(text, "sliding_window", None)
    if window is None:
        return mask(seen)
    near = seen & (distance < window)
    if "sliding_attention" in set(getattr(text, "layer_types", None) or []):
        return {"full_attention": mask(seen), "sliding_attention": mask(near)}
    return mask(near)
