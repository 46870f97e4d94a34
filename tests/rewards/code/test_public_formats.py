"""In every public format, a right response scores 1 and a wrong one less, through the real worker."""

from collections.abc import Iterator

import pytest

from rlhfless_functions.data.code_tests import read_tests
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.settings import CodeReward, RewardSettings, SamplingSettings
from tests.figures import ROOT
from tests.rewards.code.public_formats import FORMATS, PublicFormat


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer()
    yield scorer
    scorer.close()


def scores(scorer: RewardScorer, each: PublicFormat, *programs: str) -> list[float | None]:
    reward = RewardSettings(name="tests", code=CodeReward(tests_column=each.column, timeout=60.0))
    completions = [f"```python\n{program}\n```" for program in programs]
    group = RewardGroup(0, "q", None, completions, [[1]] * len(programs), ["stop"] * len(programs), each.row)
    return scorer.score([reward], [group], SamplingSettings()).totals[0]


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: f"{each.name}: {each.form}"[:60])
def test_the_tests_of_a_public_format_are_read(each: PublicFormat) -> None:
    assert len(read_tests(each.row, each.column)) == each.tests


@pytest.mark.slow
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: f"{each.name}: {each.form}"[:60])
def test_a_right_response_passes_and_a_wrong_one_does_not(scorer: RewardScorer, each: PublicFormat) -> None:
    right, wrong = scores(scorer, each, each.right, each.wrong)
    assert right == 1.0
    assert wrong is not None
    assert wrong < 1.0


def test_the_page_has_every_format() -> None:
    page = (ROOT / "docs" / "correctness.md").read_text()
    for each in FORMATS:
        assert f"| {each.name} | {each.form} | {each.meaning} | {each.tests} | 1, 0 |" in page
