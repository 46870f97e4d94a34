"""Rollouts and prepared samples on disk."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import ArtifactCorruptError, ArtifactMissingError
from rlhfless_functions.data.rollouts import (
    GeneratedSample,
    PreparedSample,
    VersionSpan,
    continued_spans,
    read_prepared,
    read_rollouts,
    write_prepared,
    write_rollouts,
)

FLOATS = st.floats(width=32, allow_nan=False)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def rollouts(draw: st.DrawFn, kind: type[GeneratedSample] = GeneratedSample) -> Any:
    """A rollout whose lists fit together, as a prepared sample if asked."""
    response = draw(TOKENS)
    ends = sorted({*draw(st.sets(st.integers(1, 6))), len(response)} & set(range(1, len(response) + 1)))
    starts = [0, *ends[:-1]]
    rollout = {
        "prompt": draw(st.integers(0, 2**40)),
        "index": draw(st.integers(0, 99)),
        "prompt_tokens": draw(TOKENS),
        "response_tokens": response,
        "log_probs": [draw(FLOATS) for _ in response],
        "finish_reason": draw(st.sampled_from(["stop", "truncated", "cut"])),
        "versions": [VersionSpan(draw(st.integers(0, 9)), *span) for span in zip(starts, ends, strict=False)],
    }
    if kind is GeneratedSample:
        return GeneratedSample(**rollout)
    per_token = st.none() | st.lists(FLOATS, min_size=len(response), max_size=len(response))
    return PreparedSample(
        **rollout,
        mask=draw(st.booleans()),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_terms=draw(st.dictionaries(st.text(max_size=5), st.none() | st.floats(allow_nan=False), max_size=3)),
        old_log_probs=draw(per_token),
        reference_log_probs=draw(per_token),
        values=draw(per_token),
        advantages=draw(per_token),
        returns=draw(per_token),
        group_reward_mean=draw(st.none() | st.floats(allow_nan=False)),
        group_reward_std=draw(st.none() | st.floats(allow_nan=False)),
    )


def rollout(prompt: int = 0, index: int = 0, length: int = 3, **changes: Any) -> GeneratedSample:
    fields: dict[str, Any] = {
        "prompt": prompt,
        "index": index,
        "prompt_tokens": [1, 2],
        "response_tokens": list(range(length)),
        "log_probs": [-0.5] * length,
        "finish_reason": "stop",
        "versions": [VersionSpan(7, 0, length)] if length else [],
    }
    return GeneratedSample(**{**fields, **changes})


# --- rollouts ----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rollouts(), max_size=4, unique_by=lambda rollout: rollout.key))
def test_rollouts_come_back_as_they_were(written: list[GeneratedSample]) -> None:
    write_rollouts("memory://rollouts/part.parquet", written)
    assert read_rollouts(["memory://rollouts/part.parquet"]) == {rollout.key: rollout for rollout in written}


def test_a_part_is_plain_parquet(tmp_path: Path) -> None:
    import pandas as pd

    part = str(tmp_path / "part.parquet")
    spans = [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]
    write_rollouts(part, [rollout(5, 1, versions=spans, finish_reason="truncated")])
    table = pq.read_table(part)
    assert table.schema.field("response_tokens").type == pa.list_(pa.int32())
    assert table.schema.field("log_probs").type == pa.list_(pa.float32())
    assert pq.ParquetFile(part).metadata.row_group(0).column(0).compression == "ZSTD"
    row = pd.read_parquet(part).iloc[0]
    assert (row["prompt"], row["index"], row["finish_reason"]) == (5, 1, "truncated")
    assert np.array_equal(row["response_tokens"], [0, 1, 2])
    assert list(row["versions"]) == [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]


def test_a_finished_sample_wins_over_a_partial_one_and_a_longer_over_a_shorter(tmp_path: Path) -> None:
    def part(name: str, *samples: GeneratedSample) -> str:
        write_rollouts(str(tmp_path / name), samples)
        return str(tmp_path / name)

    parts = [
        part("1", rollout(0, 0, 2, finish_reason="cut"), rollout(0, 1, 5, finish_reason="cut")),
        part("2", rollout(0, 0, 4, finish_reason="cut"), rollout(0, 1, 3)),
        part("3", rollout(0, 0, 3, finish_reason="cut"), rollout(0, 2, 1, finish_reason="truncated")),
    ]
    for order in (parts, parts[::-1]):
        read = read_rollouts(order)
        assert {key: (len(r.response_tokens), r.finished) for key, r in read.items()} == {
            (0, 0): (4, False),
            (0, 1): (3, True),
            (0, 2): (1, True),
        }


def test_only_the_wanted_samples_are_returned(tmp_path: Path) -> None:
    part = str(tmp_path / "part")
    write_rollouts(part, [rollout(p, i) for p in range(3) for i in range(3)])
    assert read_rollouts([part], wanted=[(1, 2), (2, 0), (9, 9)]).keys() == {(1, 2), (2, 0)}
    assert read_rollouts([part], wanted=[]) == {}
    assert read_rollouts([]) == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"log_probs": [-1.0]}, "1 log-probabilities for 3 response tokens"),
        ({"versions": []}, "cover 0 of 3 response tokens"),
        ({"versions": [VersionSpan(0, 0, 2)]}, "cover 2 of 3 response tokens"),
        ({"versions": [VersionSpan(0, 1, 3)]}, "not consecutive"),
        ({"versions": [VersionSpan(0, 0, 2), VersionSpan(0, 1, 3)]}, "not consecutive"),
        ({"versions": [VersionSpan(0, 0, 0), VersionSpan(0, 0, 3)]}, "not consecutive"),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"sample \(4, 2\): .*{problem}"):
        write_rollouts(str(tmp_path / "part"), [rollout(4, 2, **changes)])
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    part = str(tmp_path / "part.parquet")
    with pytest.raises(ArtifactMissingError, match=r"part\.parquet does not exist"):
        read_rollouts([part])
    write_rollouts(part, [rollout()])
    data = artifacts.read_bytes(part)
    other_file = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), other_file)
    for damaged in (data[:-5], data[: len(data) // 2], b"", other_file.read_bytes()):
        artifacts.write_bytes(part, damaged)
        with pytest.raises(ArtifactCorruptError, match=r"part\.parquet is not a readable file .*restore it"):
            read_rollouts([part])


def test_an_unknown_finish_reason_is_refused(tmp_path: Path) -> None:
    part = str(tmp_path / "part")
    write_rollouts(part, [rollout(finish_reason="tired")])
    with pytest.raises(ArtifactCorruptError, match="tired"):
        read_rollouts([part])


def test_reading_and_writing_does_not_import_pandas(tmp_path: Path) -> None:
    program = """
        import sys
        from rlhfless_functions.data.prompts import *
        from rlhfless_functions.data.rollouts import *
        sample = PreparedSample(0, 0, [1], [2, 3], [-1.0, -2.0], "stop", [VersionSpan(0, 0, 2)])
        sample.reward_terms = {"a": None}
        write_prepared(sys.argv[1] + "/prepared", [sample])
        assert read_prepared([sys.argv[1] + "/prepared"], wanted=[(0, 0)]) == {(0, 0): sample}
        write_prompts(sys.argv[1] + "/prompts.parquet", [Prompt(0, [1], "1")])
        assert read_prompts(sys.argv[1], [0])[0].tokens == [1]
        assert "pandas" not in sys.modules, "half a second of each cold start"
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True)


def test_a_part_is_read_without_threads_of_arrow(tmp_path: Path) -> None:
    # A thread that still held a part when the interpreter ended aborted the process.
    program = """
        import os, sys
        from rlhfless_functions.data.parquet import read_table
        from rlhfless_functions.data.rollouts import ROLLOUT_SCHEMA, GeneratedSample, write_rollouts
        write_rollouts(sys.argv[1], [GeneratedSample(0, 0, [1], [], [], "cut", [])])
        threads = os.listdir("/proc/self/task")
        assert len(read_table(sys.argv[1], ROLLOUT_SCHEMA)) == 1
        assert os.listdir("/proc/self/task") == threads
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "part.parquet")], check=True)


# --- prepared samples --------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rollouts(PreparedSample), max_size=4, unique_by=lambda sample: sample.key))
def test_prepared_samples_come_back_as_they_were(written: list[PreparedSample]) -> None:
    write_prepared("memory://prepared/part.parquet", written)
    assert read_prepared(["memory://prepared/part.parquet"]) == {sample.key: sample for sample in written}


def test_reward_terms_are_a_plain_map(tmp_path: Path) -> None:
    part = str(tmp_path / "part.parquet")
    write_prepared(part, [PreparedSample(**vars(rollout()), reward=1.5, reward_terms={"exact": 1.0, "style": None})])
    assert pq.read_table(part)["reward_terms"].to_pylist() == [[("exact", 1.0), ("style", None)]]


@pytest.mark.parametrize("name", ["old_log_probs", "reference_log_probs", "values", "advantages", "returns"])
def test_numbers_per_token_must_be_as_many_as_the_tokens(tmp_path: Path, name: str) -> None:
    sample = PreparedSample(**vars(rollout()))
    setattr(sample, name, [0.0])
    with pytest.raises(ValueError, match=f"1 {name} for 3 response tokens"):
        write_prepared(str(tmp_path / "part"), [sample])


def test_parts_of_a_batch_are_read_together(tmp_path: Path) -> None:
    parts = [str(tmp_path / str(number)) for number in range(3)]
    for number, part in enumerate(parts):
        write_prepared(part, [PreparedSample(**vars(rollout(number, index))) for index in range(2)])
    assert list(read_prepared(parts, wanted=[(2, 1), (0, 0)])) == [(0, 0), (2, 1)]


@given(lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=8))
def test_spans_say_of_each_token_what_sampled_it(lengths: list[tuple[int, int]]) -> None:
    """A response grows by some tokens at a time, with the same weights as before or with newer ones."""
    spans: list[VersionSpan] = []
    sampled_by: list[int] = []
    version = 0
    for newer, tokens in lengths:
        version += newer
        sampled_by += [version] * tokens
        spans = continued_spans(spans, version, len(sampled_by))
    assert [span.version for span in spans for _ in range(span.start, span.end)] == sampled_by
    assert [span.version for span in spans] == sorted({*sampled_by}), "one span a version"
    ends = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == ends[:-1]


def test_given_spans_and_the_outcome_of_an_episode_are_read_as_they_were_written(tmp_path: Path) -> None:
    plain = GeneratedSample(1, 0, [1], [2, 3], [-1.0, -2.0], "stop", [VersionSpan(0, 0, 2)])
    episode = GeneratedSample(
        1, 1, [1], [2, 3, 4], [-1.0, 0.0, -2.0], "stop", [VersionSpan(0, 0, 3)], [(1, 2)], {"score": 0.5}
    )
    part = str(tmp_path / "part.parquet")
    write_rollouts(part, [plain, episode])
    assert read_rollouts([part]) == {plain.key: plain, episode.key: episode}
    assert (plain.sampled_tokens, episode.sampled_tokens) == (2, 2)
    prepared = [PreparedSample(**vars(sample)) for sample in (plain, episode)]
    write_prepared(part, prepared)
    assert list(read_prepared([part]).values()) == prepared


def test_a_part_without_an_environment_has_the_columns_that_it_always_had(tmp_path: Path) -> None:
    part = str(tmp_path / "part.parquet")
    write_rollouts(part, [GeneratedSample(1, 0, [1], [2], [-1.0], "stop", [VersionSpan(0, 0, 1)])])
    assert pq.read_schema(part).names == [
        "prompt", "index", "prompt_tokens", "response_tokens", "log_probs", "finish_reason", "versions",
    ]  # fmt: skip


@pytest.mark.parametrize("spans", [[(1, 1)], [(1, 3), (2, 4)], [(3, 5)], [(-1, 1)]])
def test_given_spans_that_are_not_in_order_are_refused(tmp_path: Path, spans: list[tuple[int, int]]) -> None:
    sample = GeneratedSample(1, 0, [1], [2] * 4, [0.0] * 4, "stop", [VersionSpan(0, 0, 4)], spans)
    with pytest.raises(ValueError, match="given spans"):
        write_rollouts(str(tmp_path / "part.parquet"), [sample])
