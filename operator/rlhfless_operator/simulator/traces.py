"""Response lengths to simulate with: a generator with the published statistics, and files of real runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLUMNS = ("prompt", "epoch", "sample", "prompt_tokens", "response_tokens")


@dataclass(frozen=True)
class Trace:
    """Lengths of all responses of a run."""

    prompt_tokens: NDArray[np.int64]
    """[prompts]"""
    response_tokens: NDArray[np.int64]
    """[epochs, prompts, samples]"""

    @property
    def epochs(self) -> int:
        """Visits of each prompt."""
        return int(self.response_tokens.shape[0])

    @property
    def prompts(self) -> int:
        """Different prompts."""
        return int(self.response_tokens.shape[1])

    @property
    def samples(self) -> int:
        """Responses to a prompt in a visit."""
        return int(self.response_tokens.shape[2])


@dataclass(frozen=True)
class LengthStatistics:
    """What a workload's lengths are like.

    Per-prompt lognormal means, noise within a group, a first-order autoregression over epochs and a small share of
    runaways that reach the cap. Runaways keep to some prompts: each prompt's share is drawn from a Beta distribution.
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
    """Change of the logarithm of all lengths from one epoch to the next."""
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
        # Those that end by themselves stay below the cap; what is longer is a runaway too, as it would be in a run.
        drawn[random.random((prompts, samples)) < tendency[:, None]] = statistics.longest
        lengths[epoch] = np.clip(np.rint(drawn), 1, statistics.longest).astype(np.int64)
    drawn_prompts = statistics.prompt_median * np.exp(random.normal(0, 0.4, prompts))
    return Trace(np.clip(np.rint(drawn_prompts), 8, statistics.prompt_longest).astype(np.int64), lengths)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace as Parquet: one row a response."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    epoch, prompt, sample = np.indices(trace.response_tokens.shape).reshape(3, -1)
    pq.write_table(
        pa.table(
            {
                "prompt": prompt,
                "epoch": epoch,
                "sample": sample,
                "prompt_tokens": trace.prompt_tokens[prompt],
                "response_tokens": trace.response_tokens.reshape(-1),
            }
        ),
        path,
    )


def read_trace(path: Path) -> Trace:
    """Read a trace that a run or `write_trace` wrote; epochs in which not every prompt was visited are left out.

    Raises:
        ValueError: naming the file, the column and the remedy.
    """
    columns = dict(zip(COLUMNS, _read_columns(path), strict=True))
    if not len(columns["prompt"]):
        raise ValueError(f"{path} is empty: a trace has a row for each response")
    for name in ("prompt_tokens", "response_tokens"):
        if columns[name].min() < 0:
            raise ValueError(f"{name} in {path} is {columns[name].min()} in one row: a length is 0 or more tokens")
    prompts, prompt = np.unique(columns["prompt"], return_inverse=True)
    epochs, epoch = np.unique(columns["epoch"], return_inverse=True)
    samples, sample = np.unique(columns["sample"], return_inverse=True)
    lengths = np.full((len(epochs), len(prompts), len(samples)), -1, dtype=np.int64)
    lengths[epoch, prompt, sample] = columns["response_tokens"]
    whole = (lengths >= 0).all(axis=(1, 2))
    if not whole.any():
        raise ValueError(
            f"{path} has no epoch with all {len(prompts)} prompts and all {len(samples)} samples:"
            f" give a trace of at least one whole epoch"
        )
    prompt_tokens = np.zeros(len(prompts), dtype=np.int64)
    prompt_tokens[prompt] = columns["prompt_tokens"]
    return Trace(prompt_tokens, lengths[whole])


def _read_columns(path: Path) -> Iterator[NDArray[np.int64]]:
    # A large library that only traces in files need, so that it is not loaded without them.
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}: a trace has {', '.join(COLUMNS)}")
    table = file.read(columns=list(COLUMNS))
    for name in COLUMNS:
        yield table.column(name).to_numpy().astype(np.int64)
