"""A training step's batch: its samples in canonical order, divided into minibatches and micro-batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhfless_functions.algorithms.advantages import normalize_batch, normalize_samples
from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.api import BatchReference
from rlhfless_functions.data.estimates import estimate_samples
from rlhfless_functions.data.rollouts import PreparedSample, read_prepared
from rlhfless_functions.model.forward import RaggedBatch
from rlhfless_functions.model.micro_batches import Block, collate_run
from rlhfless_functions.model.shared_prompts import ResponseBatch
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import AlgorithmSettings

_PREPARED = {
    "log_probs": "log_probs",
    "prepared_log_probs": "old_log_probs",
    "reference_log_probs": "reference_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""A batch's numbers per token, with the samples' fields that they come from."""
_ESTIMATED = ("values", "advantages", "returns")
"""The numbers among them that come from a critic."""


def read_batch(reference: BatchReference) -> list[PreparedSample]:
    """Read the samples of a batch in canonical order, independent of its parts.

    Raises:
        TaskError: `data_invalid` if a sample is in no part, or two parts disagree on what is computed.
        ArtifactError: if a part cannot be read.
    """
    if reference.part_of:
        return _read_from_named_parts(reference)
    found = read_prepared(reference.parts)
    keys = [(sample.prompt, sample.index) for sample in reference.samples]
    missing = [key for key in keys if key not in found]
    if missing:
        raise _missing(reference, missing)
    return [found[key] for key in keys]


def _read_from_named_parts(reference: BatchReference) -> list[PreparedSample]:
    """Read the samples if each names its part, because two parts may hold the same prompt."""
    keys = [
        (part, sample.prompt, sample.index) for part, sample in zip(reference.part_of, reference.samples, strict=True)
    ]
    found: dict[tuple[int, int, int], PreparedSample] = {}
    for number, uri in enumerate(reference.parts):
        wanted = {(prompt, index) for part, prompt, index in keys if part == number}
        found |= {(number, *key): sample for key, sample in read_prepared([uri], wanted).items()}
    missing = [key[1:] for key in keys if key not in found]
    if missing:
        raise _missing(reference, missing)
    return [found[key] for key in keys]


def _missing(reference: BatchReference, missing: Sequence[tuple[int, int]]) -> TaskError:
    return TaskError(
        "data_invalid",
        f"step {reference.step}: {len(missing)} of {len(reference.samples)} samples are in none of the batch's parts,"
        f" such as (prompt, index) {missing[0]}; prepare the step again",
    )


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass; tensors are [n, R], right-padded, on the model's device."""

    tokens: RaggedBatch | ResponseBatch
    """Every sampled token of its responses is in the loss."""
    numbers: dict[str, torch.Tensor]
    """float32 numbers by name, 0 on padding.

    - `log_probs`: the sampler's. `advantages`: normalised. `prepared_log_probs`: the policy's, as preparation computed
      them.
    - `reference_log_probs`, `values` and `returns`, if they were prepared. Before its first update the learner may have
      computed values, and estimated advantages and returns.
    - `old_log_probs`: the policy's, as the learner computed them before its first update; only after an update.
    """


class TrainingBatch:
    """All samples of one training step.

    Args:
        samples: in canonical order.
        algorithm: resolved settings; where they normalise over the batch, advantages are whitened here, once, over all
            tokens that are in the loss or over all samples that have a reward. With a critic, samples may lack its
            numbers: see `needs_values`.
        step: for messages.
        factors: factor of each sample's whitened advantages; none if all are 1.

    Raises:
        TaskError: `data_invalid` if samples in the loss lack what the algorithm needs.
    """

    def __init__(
        self, samples: Sequence[PreparedSample], algorithm: AlgorithmSettings, step: int, factors: Sequence[float] = ()
    ) -> None:
        self.samples = samples
        self.lengths = [len(sample.response_tokens) for sample in samples]
        self.sampled = [sample.sampled_tokens for sample in samples]
        self.counted = [tokens if sample.mask else 0 for tokens, sample in zip(self.sampled, samples, strict=True)]
        self._algorithm = algorithm
        self._factors = factors
        # Numbers are those of sampled tokens alone.
        self._starts = np.concatenate([[0], np.cumsum(self.sampled)])
        self._numbers: dict[str, torch.Tensor] = {}
        learning = [sample for sample, counted in zip(samples, self.counted, strict=True) if counted]
        self.needs_values = (
            algorithm.advantage == "gae" and bool(learning) and all(sample.values is None for sample in learning)
        )
        """Whether preparation has left advantages to the learner, which then asks its critic (`set_values`)."""
        for name, field in _PREPARED.items():
            if self.needs_values and name in _ESTIMATED:
                continue
            present = [getattr(sample, field) is not None for sample in learning]
            if not learning or not all(present):
                # Some samples of a step may have been prepared for a frozen policy, and others not.
                mixed = any(present) and name != "prepared_log_probs"
                if mixed or (field == "advantages" and learning):
                    raise TaskError("data_invalid", f"step {step}: a sample has no {field}; prepare the step again")
                continue
            rows = [
                sample.of_sampled(numbers) if (numbers := getattr(sample, field)) is not None else [0.0] * tokens
                for sample, tokens in zip(samples, self.sampled, strict=True)
            ]
            self._numbers[name] = torch.from_numpy(np.concatenate([np.asarray(row, np.float32) for row in rows]))
        if "advantages" in self:
            self._weigh_advantages()

    def __contains__(self, name: str) -> bool:
        """Return whether the samples have these numbers for each token."""
        return name in self._numbers

    def set_old_log_probs(self, found: Iterable[tuple[Sequence[int], torch.Tensor]]) -> None:
        """Set the policy's log-probabilities from before the step's first update.

        Args:
            found: samples, and the log-probabilities of their sampled tokens, sample by sample.
        """
        flat = torch.zeros(int(self._starts[-1]))
        for rows, numbers in found:
            flat[self._places(rows)] = numbers
        self._numbers["old_log_probs"] = flat

    def set_values(self, found: Iterable[tuple[Sequence[int], torch.Tensor]]) -> None:
        """Set the critic's values from before the step's first update, and estimate advantages and returns with them.

        Args:
            found: every sample in the loss, and the values at its sampled tokens, sample by sample.
        """
        self._numbers |= {name: torch.zeros(int(self._starts[-1])) for name in _ESTIMATED}
        for rows, numbers in found:
            of_rows = numbers.split([self.sampled[row] for row in rows])
            valued = [
                replace(self.samples[row], values=self.samples[row].of_response(values.tolist()))
                for row, values in zip(rows, of_rows, strict=True)
            ]
            estimate, places = estimate_samples(valued, self._algorithm), self._places(rows)
            assert estimate.returns is not None
            self._numbers["values"][places] = numbers
            self._numbers["advantages"][places] = estimate.advantages[estimate.mask].float()
            self._numbers["returns"][places] = estimate.returns[estimate.mask].float()
        self._weigh_advantages()

    def minibatches(self, size: int | None, seed: int, step: int, epoch: int, *, keep: bool = False) -> list[list[int]]:
        """Return the samples of each optimizer update: in canonical order if there is one update, else in a shuffled
        order that depends only on the arguments.

        Args:
            size: samples of an update; None means all. The last update may have fewer.
            seed: the job's.
            step: training step.
            epoch: pass over the batch, from 0.
            keep: later epochs take the first's minibatches in another order, instead of drawing samples again.
        """
        count = len(self.samples)
        if size is None or size >= count:
            return [list(range(count))]
        order = _permutation(count, seed, step, 0 if keep else epoch)
        found = [order[start : start + size] for start in range(0, count, size)]
        return [found[place] for place in _permutation(len(found), seed, step, epoch)] if keep and epoch else found

    def normalizer(self, minibatch: Sequence[int], longest_response: int) -> float:
        """Return the divisor of the summed losses of a minibatch's micro-batches."""
        assert self._algorithm.aggregation is not None
        counted = [self.counted[index] for index in minibatch]
        return normalizer(counted, self._algorithm.aggregation, longest_response)

    def in_loss(self, minibatch: Sequence[int]) -> list[int]:
        """Return the samples with a token in the loss. The others are not computed."""
        return [index for index in minibatch if self.counted[index]]

    def tokens(self, row: int) -> int:
        """Return the number of tokens of a sample, prompt and response."""
        return len(self.samples[row].prompt_tokens) + self.lengths[row]

    def select(self, block: Block, rows: Sequence[int], device: torch.device, *, packed: bool = False) -> MicroBatch:
        """Return the tensors of one of a block's runs, with its tokens in one row if they are packed."""
        tokens = collate_run(self.samples, block, rows, pad_id=0, packed=packed).to(device)
        where = self._places(rows)
        padding = torch.zeros(tokens.response_mask.shape, device=device)
        numbers = {
            name: padding.masked_scatter(tokens.response_mask, flat[where].to(device))
            for name, flat in self._numbers.items()
        }
        return MicroBatch(tokens, numbers)

    def _weigh_advantages(self) -> None:
        """Whiten them where the algorithm does, and multiply them by the samples' factors."""
        advantages = self._numbers["advantages"]
        lengths = torch.tensor(self.sampled)
        if self._algorithm.whiten_over == "tokens":
            mask = torch.tensor([sample.mask for sample in self.samples]).repeat_interleave(lengths)
            advantages = normalize_batch(advantages, mask)
        elif self._algorithm.whiten_over == "samples":
            # All tokens of a sample have one advantage. An empty response has none, and learns nothing.
            some, first = lengths > 0, torch.from_numpy(self._starts[:-1])
            scored = torch.tensor([sample.reward is not None for sample in self.samples])[some]
            whitened = normalize_samples(advantages[first[some]], scored)
            advantages = whitened.repeat_interleave(lengths[some])
        if any(factor != 1 for factor in self._factors):
            advantages *= torch.from_numpy(np.repeat(np.asarray(self._factors, np.float32), self.sampled))
        self._numbers["advantages"] = advantages

    def _places(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the indices of the samples' sampled tokens in the batch's numbers."""
        return torch.from_numpy(np.concatenate([np.arange(self._starts[row], self._starts[row + 1]) for row in rows]))


def _permutation(count: int, seed: int, step: int, epoch: int) -> list[int]:
    return [int(place) for place in np.random.default_rng([seed % 2**63, step, epoch]).permutation(count)]
