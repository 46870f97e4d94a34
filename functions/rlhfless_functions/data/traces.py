"""Traces: the lengths of a run's responses, as Parquet files. This module does not import torch.

A trace has a row for each response: its prompt, the visit of the prompt (`epoch`, from 0), its number in the group, and
its lengths in tokens. Runs also write the training step, in one part for each chunk of prepared groups. Traces from
elsewhere may omit it. If samples act in an environment, there are also the turns of the model, the tokens that the
environment gave, and the time for which it was awaited.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlhfless_functions import artifacts
from rlhfless_functions.data.parquet import table_of, write_table
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.data.turns import TracedResponse

COLUMNS = ("prompt", "epoch", "sample", "prompt_tokens", "response_tokens")
"""Columns of every trace."""
ACTING = ("turns", "given_tokens", "away_milliseconds")
"""Further columns of a trace whose samples act in an environment."""

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TraceRows:
    """Responses as columns of equal length, in no particular order."""

    prompt: Integers
    """Row of the prompt in the dataset."""
    epoch: Integers
    """Earlier visits of the prompt."""
    sample: Integers
    """Number of the response in its group."""
    prompt_tokens: Integers
    response_tokens: Integers
    """Tokens that the policy sampled."""
    step: Integers | None = None
    """Training step, from 1, if known."""
    turns: Integers | None = None
    """Turns of the policy; None if samples act in no environment."""
    given_tokens: Integers | None = None
    """Tokens that the environment gave."""
    away_milliseconds: Integers | None = None
    """Milliseconds for which the sample waited for its environment."""

    @property
    def columns(self) -> dict[str, Integers]:
        """The columns that are there, by name."""
        return {name: column for name, column in vars(self).items() if column is not None}


def trace_rows(rollouts: Sequence[GeneratedSample], visits: Mapping[int, int], step: int) -> TraceRows:
    """Return the rows of finished samples of a training step.

    Args:
        visits: earlier visits of each prompt; none if omitted.
    """
    outcomes = [rollout.outcome for rollout in rollouts if rollout.outcome is not None]
    acting = {}
    if outcomes and len(outcomes) == len(rollouts):
        acting = {
            "turns": _column(outcome["turns"] for outcome in outcomes),
            "given_tokens": _column(len(each.response_tokens) - each.sampled_tokens for each in rollouts),
            "away_milliseconds": _column(round(1000 * outcome["seconds_away"]) for outcome in outcomes),
        }
    return TraceRows(
        prompt=_column(rollout.prompt for rollout in rollouts),
        epoch=_column(visits.get(rollout.prompt, 0) for rollout in rollouts),
        sample=_column(rollout.index for rollout in rollouts),
        prompt_tokens=_column(len(rollout.prompt_tokens) for rollout in rollouts),
        response_tokens=_column(rollout.sampled_tokens for rollout in rollouts),
        step=_column(step for _ in rollouts),
        **acting,
    )


def _column(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def write_trace_rows(uri: str, rows: TraceRows) -> None:
    """Write a trace, or a part of one, atomically.

    Raises:
        ArtifactUnwritableError: it can't be written.
    """
    columns = rows.columns
    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in columns])
    write_table(uri, {name: column.tolist() for name, column in columns.items()}, schema)


def read_trace_rows(uri: str) -> TraceRows:
    """Read a trace: a Parquet file, a folder of them, or the folder of a run, which has them in `traces`.

    A response in several parts counts once. Steps are kept if every part has them, and so are the columns of acting.

    Raises:
        ValueError: the trace is missing, empty, or lacks a column, or a length is negative; the message names the file,
            the column and the remedy.
    """
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(_read_part, _parts(uri)))
    names = list(COLUMNS)
    for further in (("step",), ACTING):
        if all(name in part for part in parts for name in further):
            names += further
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if not len(columns["prompt"]):
        raise ValueError(f"{uri} is empty; name a trace with a row for each response")
    for name in names:
        if columns[name].min() < 0:
            raise ValueError(f"{name} in {uri} is {columns[name].min()} in one row; write 0 or more")
    keys = np.stack([columns[name] for name in ("prompt", "epoch", "sample", "step") if name in columns])
    _, first = np.unique(keys, axis=1, return_index=True)
    return TraceRows(**{name: columns[name][np.sort(first)] for name in names})


def _parts(uri: str) -> list[str]:
    for folder in (artifacts.join(uri, "traces"), uri):
        if parts := [part for part in artifacts.list_files(folder) if part.endswith(".parquet")]:
            return parts
    if artifacts.exists(uri) and not artifacts.list_files(uri):
        return [uri]
    raise ValueError(f"{uri} holds no trace; name a Parquet file, a folder of them, or a run's folder")


def _read_part(uri: str) -> dict[str, Integers]:
    try:
        table = table_of(artifacts.read_bytes(uri))
    except artifacts.ArtifactError as error:
        raise ValueError(str(error)) from error
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{uri} is not a Parquet file ({error}); name a trace") from error
    present = table.column_names
    missing = [name for name in COLUMNS if name not in present]
    if missing:
        raise ValueError(f"{uri} has no column {missing[0]!r}: a trace has {', '.join(COLUMNS)}")
    names = [*COLUMNS, *(name for name in ("step", *ACTING) if name in present)]
    return {name: _whole_numbers(uri, name, table.column(name)) for name in names}


def _whole_numbers(uri: str, name: str, column: pa.ChunkedArray) -> Integers:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(
            f"{name} in {uri} is {column.type} with {column.null_count} nulls; write a whole number per row"
        )
    # pyarrow's own conversion imports pandas, which takes longer than all other work of an emulated instance.
    chunks = column.cast(pa.int64()).chunks
    found = [np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk)] for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int64), *found])


class TraceLengths:
    """Lengths of a trace by training step.

    For a response that the trace does not have at a step, use the length at the prompt's last earlier visit, or else at
    its first.

    Args:
        prompts_per_step: determines the steps of an epoch if the trace has none.
    """

    def __init__(self, rows: TraceRows, prompts_per_step: int) -> None:
        prompts, number = np.unique(rows.prompt, return_inverse=True)
        step = rows.step
        if step is None:
            step = rows.epoch * -(-len(prompts) // prompts_per_step) + 1
        self.prompt_tokens: list[int] = [0] * len(prompts)
        """Tokens of each prompt of a rehearsal's dataset: the trace's prompts in order, numbered from 0."""
        self.acts = rows.turns is not None
        """Whether its samples act in an environment."""
        self._visits: list[dict[int, dict[int, TracedResponse]]] = [{} for _ in prompts]
        for prompt, at, sample, tokens, response in zip(
            number.tolist(), step.tolist(), rows.sample.tolist(), rows.prompt_tokens.tolist(), responses_of(rows),
            strict=True,
        ):  # fmt: skip
            self.prompt_tokens[prompt] = tokens
            self._visits[prompt].setdefault(at, {})[sample] = response

    def response_tokens(self, step: int, prompt: int, sample: int) -> int:
        """Return the sampled tokens of a response; see `response`."""
        return self.response(step, prompt, sample).sampled

    def response(self, step: int, prompt: int, sample: int) -> TracedResponse:
        """Return a response; a group with fewer samples repeats them.

        Raises:
            IndexError: the trace does not have the prompt.
        """
        visits = self._visits[prompt]
        before = [at for at in visits if at <= step]
        group = visits[max(before) if before else min(visits)]
        return group[sample] if sample in group else group[sorted(group)[sample % len(group)]]


def responses_of(rows: TraceRows) -> list[TracedResponse]:
    """Return the response of each row."""
    lengths = rows.response_tokens.tolist()
    if rows.turns is None or rows.given_tokens is None or rows.away_milliseconds is None:
        return [TracedResponse(length) for length in lengths]
    acting = zip(lengths, rows.turns.tolist(), rows.given_tokens.tolist(), rows.away_milliseconds.tolist(), strict=True)
    return [TracedResponse(length, turns, given, away / 1000) for length, turns, given, away in acting]
