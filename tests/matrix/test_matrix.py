"""Whole jobs with every public option: each value once by default, every pair of values by `make test-matrix`."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfless_operator.job.reading.validation import load_job
from tests.matrix import options
from tests.matrix.checks import check_job, is_reproducible
from tests.matrix.covering import Combination, Covering
from tests.matrix.setting import Setting, can_be, open_setting
from tests.training.whole_jobs import assert_same_final_weights, run_job

REPEATED = 4
"""Of the jobs with the same bits each time, one in so many is run twice."""


def covering() -> Covering:
    axes = options.axes()
    rare = [(name, axes[name].index(value)) for name, values in options.RARE.items() for value in values]
    free = [name for name in axes if not options.bound(name)]
    return Covering(axes, can_be, rare, free=free, mending=options.MENDING)


@functools.cache
def each_value() -> list[Combination]:
    return covering().each()


@functools.cache
def every_pair() -> list[Combination]:
    return covering().pairs()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a job. What takes pairs to find is found only where they are run."""
    if "pair" in metafunc.fixturenames:
        # `-m "not matrix"`, which is in the default, names the marker too.
        marks = metafunc.config.option.markexpr or ""
        wanted = "matrix" in marks.replace("not matrix", "")
        metafunc.parametrize("pair", range(len(every_pair())) if wanted else [])
    elif "value" in metafunc.fixturenames:
        metafunc.parametrize("value", range(len(each_value())))


@pytest.fixture(scope="module")
def setting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with open_setting(tmp_path_factory.mktemp("matrix"), tiny_model) as made:
        yield made


def test_every_option_is_in_the_matrix_or_with_others() -> None:
    unheeded = {}
    for path, field in options.leaves():
        if path.startswith(tuple(options.ELSEWHERE)):
            continue
        # What is evaluated on is read as what is trained on is.
        found = [*options.values_of(path), *options.values_of(path.removeprefix("evaluation.")), field.info.default]
        missing = [choice for choice in options.choices_of(field) if choice not in found and choice != "vllm"]
        if missing or len(found) == 1:
            unheeded[path] = missing or "any value"
    assert unheeded == {}, "write values of these in tests/matrix/options.py, or in ELSEWHERE where they are tested"


def test_every_value_is_in_some_job() -> None:
    made = covering()
    jobs = made.each()
    assert made.impossible == []
    for name, values in options.axes().items():
        assert {job[name] for job in jobs} == set(range(len(values))), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
def test_each_value_once(setting: Setting, value: int) -> None:
    run_and_check(setting, each_value()[value], f"each-{value}")


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
def test_every_pair_of_values(setting: Setting, pair: int) -> None:
    run_and_check(setting, every_pair()[pair], f"pair-{pair}", repeat=pair % REPEATED == 0)


def run_and_check(setting: Setting, combination: Combination, name: str, *, repeat: bool = False) -> None:
    file = setting.write(combination, name)
    check_job(setting, file)
    if repeat and is_reproducible(load_job(file).spec):
        again = setting.write(combination, f"{name}-again")
        run_job(again)
        assert_same_final_weights(again, file)
