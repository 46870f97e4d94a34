"""Generated and prepared samples, as Parquet files for plain pyarrow and pandas. Without torch."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import Any, TypeVar, get_args

import pyarrow as pa

from rlhfless_functions.api import FinishReason
from rlhfless_functions.data.parquet import array, read_table, unreadable, values, write_table

_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
_SPANS = pa.list_(
    pa.struct(
        [
            pa.field("version", pa.int64(), nullable=False),
            pa.field("start", pa.int32(), nullable=False),
            pa.field("end", pa.int32(), nullable=False),
        ]
    )
)

ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("prompt_tokens", _TOKENS, nullable=False),
        pa.field("response_tokens", _TOKENS, nullable=False),
        pa.field("log_probs", _FLOATS, nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("versions", _SPANS, nullable=False),
    ]
)
"""Columns of a rollout part."""

_EPISODE_COLUMNS = [
    pa.field(
        "given",
        pa.list_(
            pa.struct([pa.field("start", pa.int32(), nullable=False), pa.field("end", pa.int32(), nullable=False)])
        ),
        nullable=False,
    ),
    pa.field("outcome", pa.string()),
]
"""Further columns of a part with samples of an environment; the outcome is JSON."""

PREPARED_SCHEMA = pa.schema(
    [
        *ROLLOUT_SCHEMA,
        pa.field("mask", pa.bool_(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_terms", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("old_log_probs", _FLOATS),
        pa.field("reference_log_probs", _FLOATS),
        pa.field("values", _FLOATS),
        pa.field("advantages", _FLOATS),
        pa.field("returns", _FLOATS),
        pa.field("group_reward_mean", pa.float64()),
        pa.field("group_reward_std", pa.float64()),
    ]
)
"""Columns of a prepared part."""


_Number = TypeVar("_Number")


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens `start` (inclusive) to `end` (exclusive) that one weights version sampled."""

    version: int
    start: int
    end: int


def continued_spans(earlier: Sequence[VersionSpan], version: int, length: int) -> list[VersionSpan]:
    """Return the spans of a response that a weights version has continued to `length` tokens.

    Args:
        earlier: spans of the tokens from which it was continued; none for a response from the beginning.
        version: weights version that sampled the tokens after them.
        length: tokens of the whole response, at least those of `earlier`.
    """
    spans = list(earlier)
    start = spans[-1].end if spans else 0
    if start == length:
        return spans
    if spans and spans[-1].version == version:
        start = spans.pop().start
    return [*spans, VersionSpan(version, start, length)]


@dataclass
class GeneratedSample:
    """One response to one prompt, finished or not."""

    prompt: int
    """Row of the prompt in the materialised dataset."""
    index: int
    """Number of the sample in its group."""
    prompt_tokens: list[int]
    response_tokens: list[int]
    """Tokens after the prompt, including EOS if it was sampled."""
    log_probs: list[float]
    """Log-probability of each response token at the sampling temperature."""
    finish_reason: FinishReason
    """`cut` or `turn` if the response is unfinished."""
    versions: list[VersionSpan]
    """Consecutive spans that cover the response."""
    given: list[tuple[int, int]] = field(default_factory=list)
    """Spans [start, end) of the response that an environment gave, in order. They teach nothing, and lists of numbers
    have a 0 at each of their tokens."""
    outcome: dict[str, Any] | None = None
    """The outcome of the sample's episode, if it had one."""

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens that the policy sampled."""
        return self.sampled_between(0, len(self.response_tokens))

    def sampled_between(self, start: int, end: int) -> int:
        """Return the number of sampled tokens in a span of the response."""
        return end - start - sum(max(0, min(end, last) - max(start, first)) for first, last in self.given)

    def of_sampled(self, numbers: Sequence[_Number]) -> Sequence[_Number]:
        """Return the numbers of the sampled tokens, from those of all response tokens."""
        if not self.given:
            return numbers
        return [number for start, end in self._sampled_spans() for number in numbers[start:end]]

    def of_response(self, numbers: Sequence[float]) -> list[float]:
        """Return numbers of all response tokens, from those of the sampled ones."""
        found, left = [0.0] * len(self.response_tokens), iter(numbers)
        for start, end in self._sampled_spans():
            found[start:end] = islice(left, end - start)
        return found

    def _sampled_spans(self) -> Iterator[tuple[int, int]]:
        bounds = [0, *chain.from_iterable(self.given), len(self.response_tokens)]
        return zip(bounds[::2], bounds[1::2], strict=True)

    @property
    def key(self) -> tuple[int, int]:
        """(prompt, index)."""
        return self.prompt, self.index

    @property
    def finished(self) -> bool:
        """Whether the response is complete."""
        return self.finish_reason not in ("cut", "turn")


@dataclass
class PreparedSample(GeneratedSample):
    """A generated sample with everything that learning needs. Lists have one number per response token."""

    mask: bool = True
    """Whether the sample is in the loss. Unscorable samples and masked truncated ones are not."""
    reward: float | None = None
    """Weighted sum of the reward terms; None if the sample could not be scored."""
    reward_terms: dict[str, float | None] = field(default_factory=dict)
    """Each reward's value, by its name."""
    old_log_probs: list[float] | None = None
    """Log-probabilities under the policy that generated, as preparation computes them with the published weights."""
    reference_log_probs: list[float] | None = None
    """Log-probabilities under the frozen reference policy."""
    values: list[float] | None = None
    """The critic's values; None if the learner asks its own critic."""
    advantages: list[float] | None = None
    """Advantages before whitening over the batch; None if the learner estimates them."""
    returns: list[float] | None = None
    """Targets of the critic; None if the learner estimates them."""
    group_reward_mean: float | None = None
    group_reward_std: float | None = None


# --- rollouts ----------------------------------------------------------------------------------------------------


def write_rollouts(uri: str, rollouts: Sequence[GeneratedSample]) -> None:
    """Write a rollout part: generated samples, atomically.

    Raises:
        ValueError: for a sample whose lists do not fit together.
        ArtifactUnwritableError: if the part cannot be written.
    """
    for rollout in rollouts:
        _check(rollout)
    _write(uri, rollouts, ROLLOUT_SCHEMA)


def read_rollouts(
    uris: Iterable[str], wanted: Collection[tuple[int, int]] | None = None
) -> dict[tuple[int, int], GeneratedSample]:
    """Read samples, by (prompt, index), from rollout parts.

    A sample may be in several parts: a finished one wins over a partial one, and a longer partial one over a shorter.

    Args:
        uris: the parts, in any order.
        wanted: the samples to return, if not all.

    Raises:
        ArtifactMissingError: a part can't be read.
        ArtifactCorruptError: a part is not a rollout file.
    """
    best: dict[tuple[int, int], GeneratedSample] = {}
    for rollout in _read_all(uris, GeneratedSample, ROLLOUT_SCHEMA, wanted):
        other = best.get(rollout.key)
        if other is None or _progress(rollout) > _progress(other):
            best[rollout.key] = rollout
    return best


def _progress(rollout: GeneratedSample) -> tuple[bool, int]:
    return rollout.finished, len(rollout.response_tokens)


def _check(rollout: GeneratedSample) -> None:
    length = len(rollout.response_tokens)
    if len(rollout.log_probs) != length:
        raise ValueError(
            f"sample {rollout.key}: {len(rollout.log_probs)} log-probabilities for {length} response tokens"
        )
    end = 0
    for span in rollout.versions:
        if span.start != end or span.end <= span.start:
            raise ValueError(f"sample {rollout.key}: version spans {rollout.versions} are not consecutive")
        end = span.end
    if end != length:
        raise ValueError(f"sample {rollout.key}: version spans cover {end} of {length} response tokens")
    ends = [0, *chain.from_iterable(rollout.given), length]
    if any(after < before for before, after in pairwise(ends)) or any(start == end for start, end in rollout.given):
        raise ValueError(f"sample {rollout.key}: given spans {rollout.given} are not in order in {length} tokens")


# --- prepared samples --------------------------------------------------------------------------------------------

_PER_TOKEN = ("old_log_probs", "reference_log_probs", "values", "advantages", "returns")


def write_prepared(uri: str, samples: Sequence[PreparedSample]) -> None:
    """Write a prepared part, atomically.

    Raises:
        ValueError: for a sample whose lists do not fit together.
        ArtifactUnwritableError: if the part cannot be written.
    """
    for sample in samples:
        _check(sample)
        for name in _PER_TOKEN:
            numbers = getattr(sample, name)
            if numbers is not None and len(numbers) != len(sample.response_tokens):
                raise ValueError(
                    f"sample {sample.key}: {len(numbers)} {name} for {len(sample.response_tokens)} response tokens"
                )
    _write(uri, samples, PREPARED_SCHEMA)


def read_prepared(
    uris: Iterable[str], wanted: Collection[tuple[int, int]] | None = None
) -> dict[tuple[int, int], PreparedSample]:
    """Read prepared samples, by (prompt, index), from the parts of a batch.

    Raises:
        ArtifactMissingError: a part can't be read.
        ArtifactCorruptError: a part is not a file of prepared samples.
    """
    return {sample.key: sample for sample in _read_all(uris, PreparedSample, PREPARED_SCHEMA, wanted)}


# --- rows and columns --------------------------------------------------------------------------------------------


def _write(uri: str, rows: Sequence[GeneratedSample], schema: pa.Schema) -> None:
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    columns["versions"] = [[vars(span) for span in spans] for spans in columns["versions"]]
    if any(row.given or row.outcome is not None for row in rows):
        schema = pa.schema([*schema, *_EPISODE_COLUMNS])
        columns["given"] = [[{"start": start, "end": end} for start, end in row.given] for row in rows]
        columns["outcome"] = [None if row.outcome is None else json.dumps(row.outcome) for row in rows]
    write_table(uri, columns, schema)


_Row = TypeVar("_Row", bound=GeneratedSample)


def _read_all(
    uris: Iterable[str], kind: type[_Row], schema: pa.Schema, wanted: Collection[tuple[int, int]] | None
) -> Iterator[_Row]:
    chosen = None if wanted is None else set(wanted)
    places = list(dict.fromkeys(uris))
    with ThreadPoolExecutor(max(1, min(8, len(places)))) as pool:
        tables = pool.map(lambda place: read_table(place, schema, _EPISODE_COLUMNS), places)
        for uri, table in zip(places, tables, strict=True):
            if chosen is not None:
                keys = zip(table["prompt"].to_pylist(), table["index"].to_pylist(), strict=True)
                table = table.filter(array([key in chosen for key in keys], pa.bool_()))
            columns = {name: values(table[name]) for name in table.column_names}
            columns["versions"] = [[VersionSpan(**span) for span in spans] for spans in columns["versions"]]
            if "given" in columns:
                columns["given"] = [[(span["start"], span["end"]) for span in spans] for spans in columns["given"]]
                columns["outcome"] = [None if text is None else json.loads(text) for text in columns["outcome"]]
            if "reward_terms" in columns:
                columns["reward_terms"] = [dict(terms) for terms in columns["reward_terms"]]
            if not set(columns["finish_reason"]) <= set(get_args(FinishReason)):
                raise unreadable(uri, f"finish reasons {sorted(set(columns['finish_reason']))}")
            for row in zip(*columns.values(), strict=True):
                yield kind(**dict(zip(columns, row, strict=True)))
