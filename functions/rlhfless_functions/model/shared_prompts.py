"""Computes a prompt once for all its responses, with gradients.

The samples of a group have the same prompt, which is often longer than their responses. Here the prompt goes through
the model once, and every response attends to its keys and values. Responses can be passed in any number of
micro-batches. The backward pass of each ends at the prompts' keys and values and adds to their gradients. At the end,
`backward` takes the sum of these gradients through the prompts, once.

The numbers equal those of passing each sample whole, up to rounding.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhfless_functions.model.attention_masks import KINDS, LayerMasks
from rlhfless_functions.model.packed_attention import PACKED, packed_hidden
from rlhfless_functions.model.packing import Packing, PromptStates
from rlhfless_functions.model.trial import TRIAL_LENGTHS, differs, own_hidden, trial_samples

logger = logging.getLogger(__name__)

_KERNELS = {"sdpa", "eager", PACKED}
_able: WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = WeakKeyDictionary()
"""Whether a model can share prompts, by the kernel of its attention."""


@dataclass(frozen=True)
class PackedResponses:
    """The inputs of responses in one row. A response's last token is left out, because it predicts nothing."""

    input_ids: torch.Tensor
    """[1, tokens]."""
    lengths: list[int]
    """Number of tokens of each response's input, without empty inputs."""
    numbers: list[int]
    """Index in the block of each of these responses' prompts."""
    order: torch.Tensor
    """[number of tokens that get a number] index of the token before each of them. An index i below the number of
    responses is the last token of response i's prompt; higher ones count the tokens of the row."""

    @classmethod
    def of(cls, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> "PackedResponses":
        """Return the inputs of responses to the prompts with these indices."""
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
    """n responses to some of a block's prompts; R is the longest response."""

    prompts: torch.Tensor
    """[n] index of each response's prompt in the block."""
    response_ids: torch.Tensor
    """[n, R] token ids, right-padded."""
    response_mask: torch.Tensor
    """[n, R] bool: True on the tokens of the response that get a number: all but given ones. False on padding."""
    packed: PackedResponses | None = None
    """The responses' inputs in one row, if the prompts are in one row too."""

    def to(self, device: torch.device) -> "ResponseBatch":
        """Return the same batch on another device."""
        return ResponseBatch(
            self.prompts.to(device), self.response_ids.to(device), self.response_mask.to(device), self.packed
        )

    def only(self, sampled: torch.Tensor) -> "ResponseBatch":
        """Return the batch with numbers for these response tokens alone, [n, R] bool. The others are still read."""
        kept, packed = sampled[self.response_mask], self.packed
        packed = packed if packed is None else replace(packed, order=packed.order[kept])
        return replace(self, response_mask=sampled, packed=packed)


def can_share_prompts(body: PreTrainedModel) -> bool:
    """Return whether shared prompts give the numbers of a model's own forward pass.

    Its attention must accept explicit masks, for full and sliding-window attention. One trial, in evaluation mode,
    shows whether the masks, positions and cache are all that the model needs.
    """
    kernel = body.config._attn_implementation
    fits = kernel in _KERNELS and LayerMasks.of(body.config).kinds <= KINDS and body.config.is_encoder_decoder is False
    tried = _able.setdefault(body, {})
    if fits and kernel not in tried:
        problem = _trial(body, packed=kernel == PACKED)
        tried[kernel] = not problem
        if problem:
            logger.warning("%s can't share prompts: every sample is computed whole (%s)", type(body).__name__, problem)
    return fits and tried[kernel]


@torch.inference_mode()
def _trial(body: PreTrainedModel, *, packed: bool) -> str:
    """Compare shared prompts with whole samples; return what is wrong, or nothing."""
    prompts, responses = trial_samples(body, TRIAL_LENGTHS), trial_samples(body, (6, 2, 4))
    of_prompt = [0, 1, 0]
    own = [
        own_hidden(body, [*prompts[number], *response[:-1]])[len(prompts[number]) - 1 :]
        for number, response in zip(of_prompt, responses, strict=True)
    ]
    width = max(map(len, responses))
    ids = torch.tensor([[*response, *[0] * (width - len(response))] for response in responses])
    mask = torch.arange(width) < torch.tensor([len(response) for response in responses])[:, None]
    inputs = PackedResponses.of(of_prompt, responses) if packed else None
    batch = ResponseBatch(torch.tensor(of_prompt), ids, mask, inputs).to(body.device)
    try:
        ours = SharedPrompts(body, prompts, packed=packed).hidden_before(batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return "its numbers would differ" if differs(ours, torch.cat(own), body.dtype) else ""


class SharedPrompts:
    """Keys, values and last hidden states of a block of prompts.

    Args:
        body: the transformer below the head, for which `can_share_prompts` holds.
        prompts: token ids of each, at least one prompt of at least one token.
        packed: whether to put the prompts into one row. The model and the batches must then be packed too.
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
        """Return the final hidden states that predict the response tokens, [number of response tokens, H], with
        autograd.

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
        """Propagate the gradients that the responses left at the prompts' keys and values through the prompts."""
        pairs = [
            (computed, shared.grad)
            for computed, shared in zip(self._computed, self._shared, strict=True)
            if computed.requires_grad and shared.grad is not None
        ]
        if pairs:
            torch.autograd.backward([computed for computed, _ in pairs], [gradient for _, gradient in pairs])

    @staticmethod
    def _keep_cache_when_checkpointing(body: nn.Module) -> None:
        """Both caches here accept a second write, which happens when a layer is computed again."""
        for module in body.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module._can_checkpoint_with_cache = True


_Computed = tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]
"""Last hidden states [prompts, H], and each layer's keys and values."""


class _Recorder(Cache):
    """A cache that keeps each layer's keys and values inside the autograd graph."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [rows, heads, tokens, head size]."""
        self.states.setdefault(layer_idx, (key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: there are no tokens before a prompt."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the length and the offset of the keys and values that attention reads."""
        return query_length, 0


class _Reader(Cache):
    """A cache that puts the prompts' keys and values before those of the responses."""

    def __init__(self, states: Sequence[torch.Tensor], prompts: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._states = states
        self._prompts = prompts

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that attention reads, [n, heads, prompt + response tokens, head size]."""
        keys, values = (
            torch.cat([self._states[2 * layer_idx + which].index_select(0, self._prompts), own], dim=2)
            for which, own in enumerate((key_states, value_states))
        )
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the responses, padding included."""
        return self._states[0].shape[2]


def _masks(
    config: PreTrainedConfig, positions: torch.Tensor, lengths: torch.Tensor, width: int, dtype: torch.dtype
) -> Any:
    """Return the `attention_mask` that the model takes: 4-dimensional, and one for each kind of layer if there are
    several.

    Args:
        config: of the model.
        positions: [n, R] positions of the response tokens.
        lengths: [n] lengths of their prompts.
        width: padded length of the prompts, whose keys come first.
        dtype: of the model, for kernels that add the mask.
    """
    keys = torch.arange(width, device=positions.device).expand(len(lengths), -1)
    places = torch.cat([keys, positions], dim=1)
    real = torch.cat([keys < lengths[:, None], torch.ones_like(positions, dtype=torch.bool)], dim=1)
    distance = (positions[:, :, None] - places[:, None]).masked_fill_(~real[:, None], -1)

    def mask(visible: torch.Tensor) -> torch.Tensor:
        if config._attn_implementation == "sdpa":
            return visible[:, None]
        least = torch.finfo(dtype).min
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, least)[:, None]

    return LayerMasks.of(config).make(distance, mask)
