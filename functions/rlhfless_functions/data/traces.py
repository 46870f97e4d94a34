"""Traces: the lengths of a run's responses, as Parquet files. This module does not import torch.

A trace has a row for each response: its prompt, the visit of the prompt (`epoch`, from 0), its number in the group, and
its lengths in tokens. Runs also write the training step, in one part for each chunk of prepared groups. Traces from
elsewhere may omit it.
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

COLUMNS = ("prompt", "epoch", "sample", "prompt_tokens", "response_tokens")
"""Columns of every trace."""

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
    step: Integers | None = None
    """Training step, from 1, if known."""


def trace_rows(rollouts: Sequence[GeneratedSample], visits: Mapping[int, int], step: int) -> TraceRows:
    """Return the rows of finished samples of a training step.

    Args:
        visits: earlier visits of each prompt; none if omitted.
    """
    return TraceRows(
        prompt=_column(rollout.prompt for rollout in rollouts),
        epoch=_column(visits.get(rollout.prompt, 0) for rollout in rollouts),
        sample=_column(rollout.index for rollout in rollouts),
        prompt_tokens=_column(len(rollout.prompt_tokens) for rollout in rollouts),
        response_tokens=_column(rollout.sampled_tokens for rollout in rollouts),
        step=_column(step for _ in rollouts),
    )


def _column(values: Iterable[int]) -> Integers:
    return np.fromiter(values, np.int64)


def write_trace_rows(uri: str, rows: TraceRows) -> None:
    """Write a trace, or a part of one, atomically.

    Raises:
        ArtifactUnwritableError: it can't be written.
    """
    names = [*COLUMNS, "step"] if rows.step is not None else list(COLUMNS)
    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in names])
    write_table(uri, {name: getattr(rows, name).tolist() for name in names}, schema)


def read_trace_rows(uri: str) -> TraceRows:
    """Read a trace: a Parquet file, a folder of them, or the folder of a run, which has them in `traces`.

    A response in several parts counts once. Steps are kept if every part has them.

    Raises:
        ValueError: the trace is missing, empty, or lacks a column, or a length is negative; the message names the file,
            the column and the remedy.
    """
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(_read_part, _parts(uri)))
    names = [*COLUMNS, "step"] if all("step" in part for part in parts) else list(COLUMNS)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if not len(columns["prompt"]):
        raise ValueError(f"{uri} is empty; name a trace with a row for each response")
    for name in names:
        if columns[name].min() < 0:
            raise ValueError(f"{name} in {uri} is {columns[name].min()} in one row; write 0 or more")
    keys = np.stack([columns[name] for name in ("prompt", "epoch", "sample", *names[len(COLUMNS) :])])
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
    names = [*COLUMNS, "step"] if "step" in present else list(COLUMNS)
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
        self._visits: list[dict[int, dict[int, int]]] = [{} for _ in prompts]
        for prompt, at, sample, tokens, length in zip(
            number.tolist(), step.tolist(), rows.sample.tolist(), rows.prompt_tokens.tolist(),
            rows.response_tokens.tolist(), strict=True,
        ):  # fmt: skip
            self.prompt_tokens[prompt] = tokens
            self._visits[prompt].setdefault(at, {})[sample] = length

    def response_tokens(self, step: int, prompt: int, sample: int) -> int:
        """Return the length of a response; a group with fewer samples repeats them.

        Raises:
            IndexError: the trace does not have the prompt.
        """
        visits = self._visits[prompt]
        before = [at for at in visits if at <= step]
        group = visits[max(before) if before else min(visits)]
        return group[sample] if sample in group else group[sorted(group)[sample % len(group)]]
