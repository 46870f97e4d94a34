"""The samples of a step as columns, and the time of any set of them on one instance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import Latency, LinearLatency
from rlhfless_operator.planner.step.admission import ROUNDING, admit, seconds_at_ends
from rlhfless_operator.planner.step.partition import Chain, Floats

Indices = NDArray[np.intp]

_SMALL = 2**16
"""Number of shares up to which a share's number has 16 bits."""
_DENSE = 8
"""Entries for each sample, in a table of shares by groups, up to which the table is quicker than sorting."""


@dataclass(frozen=True, slots=True)
class SampleLoad:
    """One response to generate, as the planner sees it."""

    prompt: int
    """The group that it belongs to."""
    index: int
    """Its number in the group."""
    prompt_tokens: int
    """Tokens in its context before the next response token, including those generated so far if it is resumed."""
    expected_tokens: float
    """Response tokens still to come."""
    away_seconds: float = 0.0
    """Seconds that it is still to be with its environment. Its instance is kept, and decodes others meanwhile."""


@dataclass(frozen=True)
class Cuttable:
    """A chain with the samples of its items."""

    chain: Chain
    order: Indices
    """[samples] Numbers of the samples in the chain's order."""
    first: Indices
    """[items + 1] Place in `order` at which each item begins."""

    def divide(self, starts: Sequence[int]) -> list[Indices]:
        """Return the samples of the shares that begin at the items `starts`."""
        return np.split(self.order, self.first[np.asarray(starts[1:], dtype=np.intp)])


@dataclass(frozen=True)
class Decoded:
    """A division on its instances."""

    ends: Floats
    """[samples] Moment at which each ends."""
    waiting: Floats
    """[samples] Approximate seconds that each waits for room after its instance has begun."""
    last: Floats
    """[shares] Moment at which each is done."""
    tail_end: Floats
    """[shares] Moment at which each is done if the last sample that it admits is a runaway."""


class Loads:
    """Samples as columns.

    Lengths are counted in rounds: in a round every sequence of an instance gains a token. Plans are searched with
    linear models of a round (`lines`), and forecast with the latency itself. With drafts it is the least of several
    models.

    Args:
        kv_tokens: most tokens in an instance's KV cache at a time.
        max_batch: most sequences in an instance's decode step.

    Raises:
        ValueError: for no samples, a negative length or a prompt that fits no instance.
    """

    def __init__(
        self, samples: Sequence[SampleLoad], latency: Latency, *, kv_tokens: int | None, max_batch: int | None
    ) -> None:
        if not samples:
            raise ValueError("samples is empty: there is nothing to plan")
        self.samples = samples
        self.latency = latency
        count = len(samples)
        self.prompt = np.fromiter(map(attrgetter("prompt"), samples), np.int64, count)
        self.context = np.fromiter(map(attrgetter("prompt_tokens"), samples), np.float64, count)
        self.length = np.fromiter(map(attrgetter("expected_tokens"), samples), np.float64, count)
        self.away = np.fromiter(map(attrgetter("away_seconds"), samples), np.float64, count)
        self._check(kv_tokens)
        self.lines = _search_lines(latency, self.context, self.length, max_batch)
        """Linear models to search plans with. No share takes longer than any of them says."""
        self.longest_away = float(self.away.max())
        """Longest time that a sample is with its environment, in seconds."""
        self.linear = len(latency.lines) == 1 and not self.longest_away
        """Whether one linear model gives the time of a share."""
        self._linear_work = self._work(self.lines[0])
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
        # A resumed sample also prefills the tokens beyond the prompt that its group shares.
        self._own = (self.context - shared[group]) * latency.prefill_token_seconds
        self.prefill_tokens = float(shared.sum() + (self.context - shared[group]).sum())

    @cached_property
    def _by_length(self) -> Indices:
        return np.argsort(self.length, kind="stable")

    @property
    def alone(self) -> LinearLatency:
        """The linear model of an instance with a single sequence left."""
        return self.latency.at(1, float((self.context + self.length / 2).mean()))

    def _work(self, line: LinearLatency) -> Floats:
        work: Floats = self.length * (line.sequence_seconds + line.context_seconds * (self.context + self.length / 2))
        return work

    def seconds(self, division: Sequence[Indices], start_seconds: float) -> list[float]:
        """Return the time of each share on an instance of its own. A share computes each of its prompts once."""
        if not self.linear:
            ends: list[float] = self.decoded(division, start_seconds, 0.0).last.tolist()
            return ends
        (line,) = self.lines
        order = np.concatenate(division)
        sizes = np.array([len(chosen) for chosen in division])
        first = np.cumsum(sizes) - sizes
        share = np.repeat(np.arange(len(division)), sizes)
        prompts = self._prompt_tokens(share, self.group[order], len(division))
        rounds = np.maximum(
            np.maximum.reduceat(self.length[order], first), np.add.reduceat(self.occupancy[order], first)
        )
        work = np.add.reduceat((self._linear_work + self._own)[order], first)
        seconds: list[float] = (
            start_seconds + prompts * self.latency.prefill_token_seconds + line.step_seconds * rounds + work
        ).tolist()
        return seconds

    def ends(self, chosen: Indices, start_seconds: float) -> Floats:
        """Return the moment at which each sample of a share ends, admitted in the given order as room allows [chosen].

        This is exact for a limited batch. In a KV cache with too little room, a sample is assumed to fill its final
        size.
        """
        return self.decoded((chosen,), start_seconds, 0.0).ends[chosen]

    def decoded(self, division: Sequence[Indices], start_seconds: float, tail_tokens: float) -> Decoded:
        """Return the ends of a division's samples, and of its shares.

        `tail_end` assumes that the last sample that a share admits has at least `tail_tokens`.
        """
        order = np.concatenate(division)
        sizes = np.array([len(chosen) for chosen in division])
        first = np.cumsum(sizes) - sizes
        share = np.repeat(np.arange(len(division)), sizes)
        steps = np.maximum.reduceat(self.length[order], first)
        late = np.maximum(0.0, tail_tokens - steps)
        at_once = np.add.reduceat(self.filled[order], first) <= 1 + ROUNDING
        ends, waiting = np.zeros(len(self.length)), np.zeros(len(self.length))
        begun = at_once[share]
        if begun.any():
            owner = np.full(len(self.length), -1)
            owner[order[begun]] = share[begun]
            self._end_at_once(ends, owner, len(division), start_seconds)
        for number in np.flatnonzero(~at_once).tolist():
            chosen = division[number]
            admission = admit(self.length[chosen], self.filled[chosen])
            seconds = seconds_at_ends(admission, self.context[chosen], self._prefill(chosen), self.latency)
            ends[chosen] = start_seconds + seconds
            made = float(admission.end.max())
            late[number] = max(0.0, float(admission.begin[-1]) + tail_tokens - made)
            waiting[chosen] = admission.begin * float(seconds.max()) / max(made, 1.0)
        # While some are away the batch is smaller, and so the others are no later.
        ends += self.away
        last = np.maximum.reduceat(ends[order], first)
        return Decoded(ends, waiting, last, last + late * self.alone.step_seconds)

    def _end_at_once(self, ends: Floats, owner: Indices, shares: int, start_seconds: float) -> None:
        """Set the ends of samples whose share runs from the start as a whole: the shortest ends first.

        Args:
            ends: [samples] is written to.
            owner: [samples] the share of each; -1 for samples of other shares.
        """
        owners = owner[self._by_length]
        rising = self._by_length[owners >= 0]
        # Small numbers are sorted in linear time.
        small = owners[owners >= 0].astype(np.uint16 if shares <= _SMALL else np.intp)
        ordered = rising[np.argsort(small, kind="stable")]
        owners = owner[ordered]
        context = self.context[ordered]
        last = np.cumsum(np.bincount(owners, minlength=shares))
        all_contexts = np.cumsum(context)
        # The running sums include the shares before, which are no part of a share's own sums.
        to_contexts = np.concatenate(([0.0], all_contexts))[last]
        contexts = to_contexts[owners] - all_contexts + context
        others: Floats = (last[owners] - np.arange(len(ordered))).astype(np.float64)
        decoding = self._linear_rounds if self.linear else self._least_rounds
        prompts = self._prompt_tokens(owners, self.group[ordered], shares)
        prefill = np.bincount(owners, self._own[ordered], shares) + prompts * self.latency.prefill_token_seconds
        ends[ordered] = start_seconds + prefill[owners] + decoding(ordered, owners, last, others, contexts)

    def _linear_rounds(
        self, ordered: Indices, owners: Indices, last: Indices, others: Floats, contexts: Floats
    ) -> Floats:
        """Return the seconds until each sample ends, by the one linear model [ordered].

        A response of l tokens ends when all have made l rounds: after step · l, the whole work of the shorter ones, and
        the work of the first l rounds of the others.
        """
        (line,) = self.lines
        length, work = self.length[ordered], self._linear_work[ordered]
        all_work = np.cumsum(work)
        first = np.concatenate(([0], last))[owners]
        shorter = all_work - work - np.concatenate(([0.0], all_work))[first]
        partial = (
            others * (line.sequence_seconds * length + line.context_seconds * length**2 / 2)
            + line.context_seconds * length * contexts
        )
        seconds: Floats = line.step_seconds * length + shorter + partial
        return seconds

    def _least_rounds(
        self, ordered: Indices, owners: Indices, last: Indices, others: Floats, contexts: Floats
    ) -> Floats:
        """Return the seconds until each sample ends, if a round takes the least of several linear models [ordered]."""
        length = self.length[ordered]
        first = np.concatenate(([0], last))[owners]
        made = np.where(np.arange(len(ordered)) == first, 0.0, np.roll(length, 1))
        # Between two ends the batch is the same, and its mean context halfway.
        rounds = (length - made) * self.latency.round_seconds(others, contexts + others * (made + length) / 2)
        took = np.concatenate(([0.0], np.cumsum(rounds)))
        seconds: Floats = took[1:] - took[first]
        return seconds

    def _prompt_tokens(self, owner: Indices, group: Indices, shares: int) -> Floats:
        """Return the tokens of each share's prompts, each prompt counted once [shares].

        Args:
            owner: [chosen] share of each chosen sample.
            group: [chosen] group of each chosen sample.
        """
        pairs = owner * self.groups + group
        if shares * self.groups <= _DENSE * len(pairs):
            there = np.zeros(shares * self.groups, dtype=bool)
            there[pairs] = True
            tokens: Floats = there.reshape(shares, self.groups) @ self._shared
            return tokens
        # To sort numbers takes a tenth of the time that `numpy.unique` takes to hash them.
        pairs.sort()
        pairs = pairs[np.concatenate(([True], pairs[1:] != pairs[:-1]))]
        return np.bincount(pairs // self.groups, self._shared[pairs % self.groups], shares).astype(np.float64)

    def _prefill(self, chosen: Indices) -> Floats:
        """Return the seconds of each admission [chosen]: the first sample of a group computes the shared prompt."""
        group = self.group[chosen]
        prefill: Floats = self._own[chosen].copy()
        first = np.full(self.groups, -1)
        # Of several values for a place the last one stays.
        first[group[::-1]] = np.arange(len(chosen))[::-1]
        there = np.flatnonzero(first >= 0)
        prefill[first[there]] += self._shared[there] * self.latency.prefill_token_seconds
        return prefill

    def latest(self, seconds: Floats) -> Floats:
        """Return the latest moment of each group's samples [groups].

        Args:
            seconds: [samples] moments.
        """
        found: Floats = np.maximum.reduceat(seconds[self._by_prompt], self._group_start)
        return found

    def whole_groups(
        self, line: LinearLatency, start_seconds: float, tail: float = 0.0, *, at_once: bool = False
    ) -> Cuttable:
        """Return the chain whose items are whole groups, by a linear model of rounds."""
        by_prompt, start = self._by_prompt, self._group_start
        longest = np.maximum.reduceat(self.length[by_prompt], start)
        work = np.add.reduceat((self._work(line) + self._own)[by_prompt], start)
        work = work + self._shared * line.prefill_token_seconds
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
                step_seconds=line.step_seconds,
                start_seconds=start_seconds + self.longest_away,
                tail=tail,
                filling=np.add.reduceat(self.filled[by_prompt], start)[rank] if at_once else None,
            ),
            order=by_prompt[np.repeat(start[rank], sizes) + within],
            first=first,
        )

    def single_samples(
        self, line: LinearLatency, start_seconds: float, tail: float = 0.0, *, at_once: bool = False
    ) -> Cuttable:
        """Return the chain whose items are samples. A cut inside a group pays for the group's prompt again.

        If samples of a group are not neighbours, because their lengths differ, each run of them is charged the prompt.
        `seconds` of the resulting shares is exact.
        """
        order = self._by_prompt[np.argsort(-self.length[self._by_prompt], kind="stable")]
        prompt = (self._shared * line.prefill_token_seconds)[self.group[order]]
        opens = np.concatenate(([True], np.diff(self.group[order]) != 0))
        return Cuttable(
            Chain(
                self.length[order],
                (self._work(line) + self._own)[order] + np.where(opens, prompt, 0.0),
                self.occupancy[order],
                np.where(opens, 0.0, prompt),
                step_seconds=line.step_seconds,
                start_seconds=start_seconds + self.longest_away,
                tail=tail,
                filling=self.filled[order] if at_once else None,
            ),
            order=order,
            first=np.arange(len(order) + 1),
        )

    def _check(self, kv_tokens: int | None) -> None:
        columns = ("prompt_tokens", self.context), ("expected_tokens", self.length), ("away_seconds", self.away)
        for name, column in columns:
            bad = np.flatnonzero(~(column >= 0) | ~np.isfinite(column))
            if len(bad):
                sample = self.samples[int(bad[0])]
                raise ValueError(
                    f"{name} of prompt {sample.prompt}, sample {sample.index}, is {getattr(sample, name)}:"
                    f" give a number of 0 or more {name.rpartition('_')[2]}"
                )
        if kv_tokens is not None and self.context.max() >= kv_tokens:
            sample = self.samples[int(self.context.argmax())]
            raise ValueError(
                f"kv_tokens is {kv_tokens}, and prompt {sample.prompt} alone has {sample.prompt_tokens} tokens:"
                f" raise it to at least {sample.prompt_tokens + 1}, or drop the prompt"
            )


def _search_lines(
    latency: Latency, context: Floats, length: Floats, max_batch: int | None
) -> tuple[LinearLatency, ...]:
    """Return the linear models for a full instance, for a single sequence, and for a batch between: each once."""
    most = min(len(length), max_batch or len(length))
    mean = float((context + length / 2).mean())
    return tuple(dict.fromkeys(latency.at(batch, mean) for batch in (most, math.sqrt(most), 1)))
