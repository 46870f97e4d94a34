"""What changed in a file: it comes out as it was, or not at all."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.artifacts import deltas
from rlhfless_functions.artifacts.deltas import apply_delta, write_delta


def bfloat16(values: np.ndarray) -> bytes:
    """Float32 numbers cut to bfloat16, as they are in a file."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def files(folder: Path, base: bytes, new: bytes) -> tuple[Path, Path, Path, Path]:
    paths = folder / "base", folder / "new", folder / "delta", folder / "made"
    paths[0].write_bytes(base)
    paths[1].write_bytes(new)
    return paths


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.binary(min_size=1, max_size=500),
    changes=st.lists(st.tuples(st.integers(0, 499), st.integers(0, 255)), max_size=500),
    block=st.sampled_from([64, 128, 4096]),
)
def test_any_file_comes_out_as_it_was(
    base: bytes, changes: list[tuple[int, int]], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "_BLOCK", block)
    monkeypatch.setattr(deltas, "WORTH", 1000.0)
    changed = bytearray(base)
    for place, value in changes:
        changed[place % len(base)] = value
    old, new, delta, made = files(tmp_path, base, bytes(changed))
    assert write_delta(old, new, delta)
    apply_delta(old, delta, made)
    assert made.read_bytes() == bytes(changed)
    assert old.read_bytes() == base


@pytest.mark.parametrize(("rate", "most"), [(0.0, 0.001), (1e-6, 0.05), (2e-4, 0.4)])
def test_the_smaller_an_update_the_smaller_its_delta(rate: float, most: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal(2**18, dtype=np.float32) * np.float32(0.02)
    update = random.standard_normal(2**18, dtype=np.float32) * np.float32(0.45 * rate)
    old, new, delta, made = files(tmp_path, bfloat16(weights), bfloat16(weights + update))
    assert write_delta(old, new, delta)
    assert delta.stat().st_size <= most * new.stat().st_size
    apply_delta(old, delta, made)
    assert made.read_bytes() == new.read_bytes()


@pytest.mark.parametrize("new", [np.random.default_rng(0).bytes(1000), b"\0" * 999, b""])
def test_a_file_that_is_another_one_altogether_has_none(new: bytes, tmp_path: Path) -> None:
    old, other, delta, _ = files(tmp_path, b"\0" * 1000, new)
    assert not write_delta(old, other, delta)


def test_what_is_no_delta_is_refused(tmp_path: Path) -> None:
    old, new, delta, made = files(tmp_path, b"\0" * 1000, b"\0" * 999 + b"1")
    assert write_delta(old, new, delta)
    whole = delta.read_bytes()
    for broken, problem in (
        (b"", "cut short"),
        (whole[:20], "cut short"),
        (whole[:27], "cut short"),
        (b"x" + whole[1:], "no delta of a kind that this release knows"),
        (whole[:-10], "can't be decompressed"),
        (whole[:29] + b"garbage" + whole[36:], "can't be decompressed"),
    ):
        delta.write_bytes(broken)
        with pytest.raises(ValueError, match=problem):
            apply_delta(old, delta, made)
    delta.write_bytes(whole)
    old.write_bytes(b"\0" * 1001)
    with pytest.raises(ValueError, match=r"its base had 1000 bytes, and .*/base has 1001"):
        apply_delta(old, delta, made)
