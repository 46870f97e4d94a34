"""The samples of a step as columns, and the time that any set of them takes on one instance."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.admission import admit, seconds_at_ends
from rlhfless_operator.planner.latency import LinearLatency
from rlhfless_operator.planner.partition import Chain, Floats

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SampleLoad:
    """One response to generate, as the planner sees it."""

    prompt: int
    """The group that it belongs to."""
    index: int
    """Its number in the group."""
    prompt_tokens: int
    """Tokens in its context before the next response token; of a sample that is resumed, those generated count too."""
    expected_tokens: float
    """Response tokens still to come."""


@dataclass(frozen=True)
class Cuttable:
    """A chain, and which samples its items are."""

    chain: Chain
    order: Indices
    """[samples] numbers of the samples in the chain's order."""
    first: Indices
    """[items + 1] where each item begins in `order`."""

    def divide(self, starts: Sequence[int]) -> list[Indices]:
        """The samples of the shares that begin at the items `starts`."""
        return np.split(self.order, self.first[np.asarray(starts[1:], dtype=np.intp)])


@dataclass(frozen=True)
class Decoded:
    """A share on an instance."""

    ends: Floats
    """[chosen] When each sample ends."""
    waiting: Floats
    """[chosen] About how long each waits for room after the instance has begun."""
    tail_end: float
    """When the share is done if the last to be admitted is a runaway."""


class Loads:
    """Samples as columns.

    Args:
        kv_tokens: tokens in an instance's KV cache at a time.
        max_batch: sequences in an instance's decode step.

    Raises:
        ValueError: for no samples, a negative length or a prompt that fits no instance.
    """

    def __init__(
        self, samples: Sequence[SampleLoad], latency: LinearLatency, *, kv_tokens: int | None, max_batch: int | None
    ) -> None:
        if not samples:
            raise ValueError("samples is empty: there is nothing to plan")
        self.samples = samples
        self.latency = latency
        count = len(samples)
        self.prompt = np.fromiter(map(attrgetter("prompt"), samples), np.int64, count)
        self.context = np.fromiter(map(attrgetter("prompt_tokens"), samples), np.float64, count)
        self.length = np.fromiter(map(attrgetter("expected_tokens"), samples), np.float64, count)
        self._check(kv_tokens)
        self.work: Floats = self.length * (
            latency.sequence_seconds + latency.context_seconds * (self.context + self.length / 2)
        )
        filled = np.full(len(samples), 1.0 / max_batch if max_batch else 0.0)
        if kv_tokens:
            filled = np.maximum(filled, np.minimum(1.0, (self.context + self.length) / kv_tokens))
        self.filled: Floats = filled
        self.occupancy: Floats = self.length * filled

        grouped = bool((np.diff(self.prompt) >= 0).all())
        by_prompt = np.arange(len(samples)) if grouped else np.argsort(self.prompt, kind="stable")
        changes = np.flatnonzero(np.diff(self.prompt[by_prompt])) + 1
        self._by_prompt = by_prompt
        self._group_start = np.concatenate(([0], changes)).astype(np.intp)
        sizes = np.diff(np.append(self._group_start, len(samples)))
        group = np.empty(len(samples), dtype=np.intp)
        group[by_prompt] = np.repeat(np.arange(len(sizes)), sizes)
        self.group = group
        self.groups = len(sizes)
        shared = np.minimum.reduceat(self.context[by_prompt], self._group_start)
        self._shared = shared
        # What a sample has to prefill besides the prompt that its group shares.
        self._own = (self.context - shared[group]) * latency.prefill_token_seconds
        self.prefill_tokens = float(shared.sum() + (self.context - shared[group]).sum())

    def seconds(self, division: Sequence[Indices], start_seconds: float) -> list[float]:
        """Time of each share of a division, one instance a share; a share computes each of its prompts once."""
        order = np.concatenate(division)
        sizes = np.array([len(chosen) for chosen in division])
        first = np.cumsum(sizes) - sizes
        share = np.repeat(np.arange(len(division)), sizes)
        pairs = np.unique(share * self.groups + self.group[order])
        prompts = np.bincount(pairs // self.groups, self._shared[pairs % self.groups], len(division))
        rounds = np.maximum(
            np.maximum.reduceat(self.length[order], first), np.add.reduceat(self.occupancy[order], first)
        )
        work = np.add.reduceat((self.work + self._own)[order], first)
        seconds: list[float] = (
            start_seconds + prompts * self.latency.prefill_token_seconds + self.latency.step_seconds * rounds + work
        ).tolist()
        return seconds

    def ends(self, chosen: Indices, start_seconds: float) -> Floats:
        """[chosen] when each sample of a share ends, admitted in the order given as far as there is room.

        Exact for a batch. Where the KV cache has too little room, a sample is taken to fill what it will come to.
        """
        return self.decoded(chosen, start_seconds, 0.0).ends

    def decoded(self, chosen: Indices, start_seconds: float, tail_tokens: float) -> Decoded:
        """`ends`, and what becomes of the share if a response that begins with it had `tail_tokens` at least."""
        latency = self.latency
        length, context = self.length[chosen], self.context[chosen]
        admission = admit(length, self.filled[chosen])
        if admission.begin[-1] > 0:
            ends = start_seconds + seconds_at_ends(admission, context, self._prefill(chosen), latency)
        else:
            ends = self._ends_at_once(chosen, start_seconds)
        steps, last = float(admission.end.max()), float(ends.max())
        late = max(0.0, float(admission.begin[-1]) + tail_tokens - steps)
        waiting = admission.begin * (last - start_seconds) / max(steps, 1.0)
        return Decoded(ends, waiting, last + late * latency.step_seconds)

    def _ends_at_once(self, chosen: Indices, start_seconds: float) -> Floats:
        """[chosen] when each sample of a share ends, all of them running from the start on.

        A response of l steps ends when all have made l steps: after step · l, the whole work of those that are shorter
        and the work of the first l steps of the others.
        """
        latency = self.latency
        length, context = self.length[chosen], self.context[chosen]
        rank = np.argsort(length, kind="stable")
        sorted_length, sorted_context = length[rank], context[rank]
        shorter = np.concatenate(([0.0], np.cumsum(self.work[chosen][rank])[:-1]))
        others = np.arange(len(chosen), 0, -1)
        contexts = np.cumsum(sorted_context[::-1])[::-1]
        partial = (
            others * (latency.sequence_seconds * sorted_length + latency.context_seconds * sorted_length**2 / 2)
            + latency.context_seconds * sorted_length * contexts
        )
        before = start_seconds + float(self._prefill(chosen).sum())
        ends = np.empty(len(chosen))
        ends[rank] = before + latency.step_seconds * sorted_length + shorter + partial
        return ends

    def _prefill(self, chosen: Indices) -> Floats:
        """[chosen] seconds that each admission takes: the first of a group computes the prompt that it shares."""
        group = self.group[chosen]
        prefill: Floats = self._own[chosen].copy()
        _, first = np.unique(group, return_index=True)
        prefill[first] += self._shared[group[first]] * self.latency.prefill_token_seconds
        return prefill

    def whole_groups(self, start_seconds: float, tail: float = 0.0, *, at_once: bool = False) -> Cuttable:
        """The chain whose items are groups, so that no cut divides one."""
        by_prompt, start = self._by_prompt, self._group_start
        longest = np.maximum.reduceat(self.length[by_prompt], start)
        work = np.add.reduceat((self.work + self._own)[by_prompt], start)
        work = work + self._shared * self.latency.prefill_token_seconds
        occupancy = np.add.reduceat(self.occupancy[by_prompt], start)
        rank = np.argsort(-longest, kind="stable")
        sizes = np.diff(np.append(start, len(by_prompt)))[rank]
        first = np.concatenate(([0], np.cumsum(sizes))).astype(np.intp)
        within = np.arange(len(by_prompt)) - np.repeat(first[:-1], sizes)
        return Cuttable(
            Chain(
                longest[rank],
                work[rank],
                occupancy[rank],
                np.zeros(self.groups),
                step_seconds=self.latency.step_seconds,
                start_seconds=start_seconds,
                tail=tail,
                filling=np.add.reduceat(self.filled[by_prompt], start)[rank] if at_once else None,
            ),
            order=by_prompt[np.repeat(start[rank], sizes) + within],
            first=first,
        )

    def single_samples(self, start_seconds: float, tail: float = 0.0, *, at_once: bool = False) -> Cuttable:
        """The chain whose items are samples; a cut inside a group pays for the group's prompt again.

        Where samples of a group are not neighbours, because their lengths differ, each run of them is charged the
        prompt; `seconds` of the shares that come out is exact.
        """
        order = self._by_prompt[np.argsort(-self.length[self._by_prompt], kind="stable")]
        prompt = (self._shared * self.latency.prefill_token_seconds)[self.group[order]]
        opens = np.concatenate(([True], np.diff(self.group[order]) != 0))
        return Cuttable(
            Chain(
                self.length[order],
                (self.work + self._own)[order] + np.where(opens, prompt, 0.0),
                self.occupancy[order],
                np.where(opens, 0.0, prompt),
                step_seconds=self.latency.step_seconds,
                start_seconds=start_seconds,
                tail=tail,
                filling=self.filled[order] if at_once else None,
            ),
            order=order,
            first=np.arange(len(order) + 1),
        )

    def _check(self, kv_tokens: int | None) -> None:
        for name, column in (("prompt_tokens", self.context), ("expected_tokens", self.length)):
            bad = np.flatnonzero(~(column >= 0) | ~np.isfinite(column))
            if len(bad):
                sample = self.samples[int(bad[0])]
                raise ValueError(
                    f"{name} of prompt {sample.prompt}, sample {sample.index}, is {getattr(sample, name)}:"
                    f" give a number of 0 or more tokens"
                )
        if kv_tokens is not None and self.context.max() >= kv_tokens:
            sample = self.samples[int(self.context.argmax())]
            raise ValueError(
                f"kv_tokens is {kv_tokens}, and prompt {sample.prompt} alone has {sample.prompt_tokens} tokens:"
                f" raise it to at least {sample.prompt_tokens + 1}, or drop the prompt"
            )
