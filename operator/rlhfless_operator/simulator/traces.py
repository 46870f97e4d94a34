"""Response lengths for the simulator: a generator with the published statistics, and traces of real runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.data.turns import TracedResponse
from rlhfless_operator.simulator.episode import Episode
from rlhfless_operator.simulator.instance import Response


@dataclass(frozen=True)
class TraceStep:
    """The groups of a training step."""

    epoch: int
    """Number of earlier visits of its prompts."""
    lengths: dict[int, list[int]]
    """Response tokens of each prompt's group."""
    acted: Mapping[tuple[int, int], TracedResponse] = field(default_factory=dict)
    """Turns of each sample, by prompt and place in its group; empty without an environment."""

    def responses(self, prompt_tokens: NDArray[np.int64]) -> list[Response]:
        """Return its fresh responses.

        Args:
            prompt_tokens: of every prompt.
        """
        return [
            Response(
                *(prompt, index, int(prompt_tokens[prompt]), length),
                episode=Episode(self.acted[prompt, index]) if self.acted else None,
            )
            for prompt, group in self.lengths.items()
            for index, length in enumerate(group)
        ]

    def given_tokens(self, prompt: int) -> int:
        """Return the tokens that environments give to a prompt's samples."""
        return sum(self.acted[prompt, index].given for index in range(len(self.lengths[prompt])) if self.acted)


@dataclass(frozen=True)
class Trace:
    """Lengths of all responses of whole epochs."""

    prompt_tokens: NDArray[np.int64]
    """[prompts]"""
    response_tokens: NDArray[np.int64]
    """[epochs, prompts, samples]"""

    @property
    def epochs(self) -> int:
        """Number of visits of each prompt."""
        return int(self.response_tokens.shape[0])

    @property
    def prompts(self) -> int:
        """Different prompts."""
        return int(self.response_tokens.shape[1])

    @property
    def samples(self) -> int:
        """Responses to a prompt in a visit."""
        return int(self.response_tokens.shape[2])

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return int(self.response_tokens.max())

    def step_count(self, prompts_per_step: int) -> int:
        """Return the number of steps that `steps` yields."""
        return self.epochs * (self.prompts // prompts_per_step)

    def steps(self, prompts_per_step: int, random: np.random.Generator) -> Iterator[TraceStep]:
        """Yield training steps. Each epoch has the prompts in a new order, without those left over at its end."""
        for epoch in range(self.epochs):
            order = random.permutation(self.prompts).tolist()
            for begin in range(0, self.prompts - prompts_per_step + 1, prompts_per_step):
                chosen = order[begin : begin + prompts_per_step]
                yield TraceStep(epoch, {prompt: self.response_tokens[epoch, prompt].tolist() for prompt in chosen})


@dataclass(frozen=True)
class RecordedTrace:
    """The lengths of a run, step by step."""

    prompt_tokens: NDArray[np.int64]
    """[prompts]"""
    recorded: Sequence[TraceStep]
    """Steps in their order; not empty."""

    @property
    def acts(self) -> bool:
        """Whether its samples act in an environment."""
        return bool(self.recorded[0].acted)

    @property
    def prompts(self) -> int:
        """Different prompts."""
        return len(self.prompt_tokens)

    @property
    def samples(self) -> int:
        """Responses to a prompt in a visit."""
        return max(len(group) for step in self.recorded for group in step.lengths.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return max(max(group) for step in self.recorded for group in step.lengths.values())

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts of the largest step."""
        return max(len(step.lengths) for step in self.recorded)

    def step_count(self, prompts_per_step: int) -> int:
        """Return the number of steps that `steps` yields."""
        return len(self.recorded)

    def steps(self, prompts_per_step: int, random: np.random.Generator) -> Iterator[TraceStep]:
        """Return the run's own steps; the arguments have no effect."""
        yield from self.recorded


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of a workload's lengths.

    Prompts have lognormal means, with noise within a group and a first-order autoregression over epochs. A small share
    of responses are runaways that reach the cap. They keep to some prompts: each prompt's share is drawn from a Beta
    distribution.
    """

    median: float
    """Tokens of the median response that ends by itself."""
    longest: int
    """Length at which responses are truncated."""
    prompt_median: float = 150.0
    """Tokens of the median prompt."""
    prompt_longest: int = 1024
    spread: float = 0.8
    """Standard deviation of the logarithm of the prompts' means."""
    noise: float = 0.25
    """Standard deviation of the logarithm within a group."""
    persistence: float = 0.99
    """Correlation of a prompt's mean from one epoch to the next; 0.99 moves a prompt by 3 % of the ranks."""
    drift: float = 0.0
    """Change of the logarithm of all lengths from one epoch to the next epoch."""
    runaways: float = 0.02
    """Share of responses that reach the cap."""


def generate(statistics: LengthStatistics, *, epochs: int, prompts: int, samples: int, seed: int) -> Trace:
    """Draw a trace."""
    random = np.random.default_rng(seed)
    level = random.normal(0, 1, prompts)
    if statistics.runaways > 0:
        tendency = random.beta(0.3, 0.3 * (1 / statistics.runaways - 1), prompts)
    else:
        tendency = np.zeros(prompts)
    lengths = np.empty((epochs, prompts, samples), dtype=np.int64)
    for epoch in range(epochs):
        if epoch:
            innovation = random.normal(0, np.sqrt(1 - statistics.persistence**2), prompts)
            level = statistics.persistence * level + innovation
        logarithm = np.log(statistics.median) + statistics.drift * epoch + statistics.spread * level
        drawn = np.exp(logarithm[:, None] + random.normal(0, statistics.noise, (prompts, samples)))
        # Responses that end by themselves stay below the cap. Longer ones are runaways too, as in a run.
        drawn[random.random((prompts, samples)) < tendency[:, None]] = statistics.longest
        lengths[epoch] = np.clip(np.rint(drawn), 1, statistics.longest).astype(np.int64)
    drawn_prompts = statistics.prompt_median * np.exp(random.normal(0, 0.4, prompts))
    return Trace(np.clip(np.rint(drawn_prompts), 8, statistics.prompt_longest).astype(np.int64), lengths)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as Parquet: one row a response."""
    # A large library that only traces in files need: it is loaded with them.
    from rlhfless_functions.data.traces import TraceRows, write_trace_rows

    epoch, prompt, sample = np.indices(trace.response_tokens.shape).reshape(3, -1)
    rows = TraceRows(prompt, epoch, sample, trace.prompt_tokens[prompt], trace.response_tokens.reshape(-1))
    write_trace_rows(str(path), rows)


def read_trace(place: str | Path) -> Trace | RecordedTrace:
    """Read a trace from a file, a folder of parts, or a run's folder, as a run or `write_trace` wrote it.

    A trace with steps keeps them. From a trace without steps, epochs in which not every prompt was visited are left
    out.

    Raises:
        ValueError: naming the file, the column and the remedy.
    """
    try:
        from rlhfless_functions.data.traces import read_trace_rows, responses_of
    except ModuleNotFoundError as error:
        raise ValueError(f"to read traces, pip install {error.name}") from error

    rows = read_trace_rows(str(place))
    prompts, prompt = np.unique(rows.prompt, return_inverse=True)
    prompt_tokens = np.zeros(len(prompts), dtype=np.int64)
    prompt_tokens[prompt] = rows.prompt_tokens
    if rows.step is not None:
        acted = responses_of(rows) if rows.turns is not None else []
        return RecordedTrace(prompt_tokens, _recorded(rows.step, prompt, rows.sample, rows.response_tokens, acted))
    if rows.turns is not None:
        raise ValueError(f"{place} has turns and no column step: add step, or remove turns")
    epochs, epoch = np.unique(rows.epoch, return_inverse=True)
    samples, sample = np.unique(rows.sample, return_inverse=True)
    lengths = np.full((len(epochs), len(prompts), len(samples)), -1, dtype=np.int64)
    lengths[epoch, prompt, sample] = rows.response_tokens
    whole = (lengths >= 0).all(axis=(1, 2))
    if not whole.any():
        raise ValueError(
            f"{place} has no epoch with all {len(prompts)} prompts and all {len(samples)} samples:"
            f" give a trace of at least one whole epoch"
        )
    return Trace(prompt_tokens, lengths[whole])


def _recorded(
    step: NDArray[np.int64],
    prompt: NDArray[np.intp],
    sample: NDArray[np.int64],
    response_tokens: NDArray[np.int64],
    acted: Sequence[TracedResponse],
) -> list[TraceStep]:
    """Return the steps and each group's samples in order. A prompt that comes again begins a new epoch."""
    steps: dict[int, dict[int, list[int]]] = {}
    turns: dict[int, dict[tuple[int, int], TracedResponse]] = {}
    for row in np.lexsort((sample, prompt, step)).tolist():
        group = steps.setdefault(int(step[row]), {}).setdefault(int(prompt[row]), [])
        if acted:
            turns.setdefault(int(step[row]), {})[int(prompt[row]), len(group)] = acted[row]
        group.append(int(response_tokens[row]))
    visits: dict[int, int] = {}
    recorded = []
    for number, groups in steps.items():
        recorded.append(TraceStep(min(visits.get(each, 0) for each in groups), groups, turns.get(number, {})))
        for each in groups:
            visits[each] = visits.get(each, 0) + 1
    return recorded
