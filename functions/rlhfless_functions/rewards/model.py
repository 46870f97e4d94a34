"""A Hugging Face sequence-classification model whose logit is the reward."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhfless_functions import artifacts
from rlhfless_functions.model.forward import micro_batches
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.pool import Outcome, RewardUnusableError
from rlhfless_functions.rewards.process import WorkerStopped
from rlhfless_functions.runtime.device_memory import empty
from rlhfless_functions.weights.building import building

PASS_TOKENS = 16384
"""Most tokens of one forward pass, padding included."""


class RewardModel:
    """A reward model in memory, on the accelerator if there is one.

    Args:
        source: local folder, fsspec URI or hub name of the model with its tokenizer.

    Raises:
        RewardUnusableError: if it cannot be loaded, or has more than one label.
    """

    def __init__(self, source: str) -> None:
        try:
            # Not a URI, an absolute path or an existing folder: the name of a model on the hub.
            local = artifacts.local_path(source)
            hub = local is not None and not local.is_absolute() and not local.exists()
            place = source if hub else artifacts.local_folder(source, published=False)
            self._tokenizer = AutoTokenizer.from_pretrained(place)
            with building():
                model = AutoModelForSequenceClassification.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise RewardUnusableError(f"cannot load the reward model {source}: {error}") from error
        if model.config.num_labels != 1:
            raise RewardUnusableError(
                f"needs a model with one label, but {source} has {model.config.num_labels}; train it as a reward model"
                " (num_labels=1)"
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._source = source
        config = model.config.get_text_config()
        self._longest = getattr(config, "max_position_embeddings", None)
        # Decoders take a row's last token that is not padding as its end. With EOS as padding they would miss the EOS.
        self._pads = self._tokenizer.pad_token_id not in (None, self._tokenizer.eos_token_id)
        config.pad_token_id = self._tokenizer.pad_token_id if self._pads else -1

    def close(self) -> None:
        """Free its memory. It can't score any more."""
        empty(self._model)

    def score(self, groups: Sequence[RewardGroup], stopped: Callable[[], bool] = lambda: False) -> list[Outcome]:
        """Score groups; one outcome each, in their order.

        Raises:
            RewardUnusableError: for chat data, if the model has no chat template.
            WorkerStopped: if `stopped` said so.
        """
        rows = [ids for group in groups for ids in self._tokens(group)]
        scores: list[float] = [math.nan] * len(rows)
        fitting = [index for index, ids in enumerate(rows) if self._longest is None or len(ids) <= self._longest]
        for batch in self._batches([len(rows[index]) for index in fitting]):
            if stopped():
                raise WorkerStopped
            chosen = [fitting[position] for position in batch]
            for index, score in zip(chosen, self._forward([rows[index] for index in chosen]), strict=True):
                scores[index] = score
        outcomes = []
        start = 0
        for group in groups:
            end = start + group.size
            outcomes.append(self._outcome(scores[start:end], max(map(len, rows[start:end]))))
            start = end
        return outcomes

    def _tokens(self, group: RewardGroup) -> list[list[int]]:
        if group.messages is None:
            texts = [group.text + completion for completion in group.completions]
            return list(self._tokenizer(texts)["input_ids"])
        if not self._tokenizer.chat_template:
            raise RewardUnusableError(f"got chat messages, but {self._source} has no chat template; give it one")
        chats = [[*group.messages, {"role": "assistant", "content": answer}] for answer in group.completions]
        texts = self._tokenizer.apply_chat_template(chats, tokenize=False)
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"])

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        if self._pads:
            return micro_batches(lengths, PASS_TOKENS)
        by_length: dict[int, list[int]] = defaultdict(list)
        for position, length in enumerate(lengths):
            by_length[length].append(position)
        return [
            positions[start : start + max(1, PASS_TOKENS // length)]
            for length, positions in by_length.items()
            for start in range(0, len(positions), max(1, PASS_TOKENS // length))
        ]

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        width = max(map(len, rows))
        pad = self._tokenizer.pad_token_id if self._pads else 0
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        mask = torch.arange(width, device=self._device) < lengths[:, None]
        logits = self._model(input_ids=ids, attention_mask=mask.long()).logits
        return [float(score) for score in logits.float().squeeze(-1).tolist()]

    def _outcome(self, scores: list[float], longest: int) -> Outcome:
        if all(map(math.isfinite, scores)):
            return Outcome(list(scores))
        if self._longest is not None and longest > self._longest:
            error = f"got {longest} tokens, more than the {self._longest} positions of {self._source}"
        else:
            error = f"got a score from {self._source} that is not finite"
        return Outcome([None] * len(scores), error)
