"""Print the table of the public formats of tests that the code reward reads, with the scores of a right and a wrong
response to an example of each.

    python benchmarks/rewards/code_formats.py
"""

from rlhfless_functions.data.code_tests import read_tests
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.settings import CodeReward, RewardSettings, SamplingSettings
from tests.rewards.code.public_formats import FORMATS, PublicFormat


def main() -> None:
    """Print the table."""
    print("| From | The row's tests | How they are run | Tests | Right, wrong response |")
    print("|---|---|---|---|---|")
    scorer = RewardScorer()
    try:
        for each in FORMATS:
            right, wrong = scores(scorer, each)
            tests = len(read_tests(each.row, each.column))
            print(f"| {each.name} | {each.form} | {each.meaning} | {tests} | {right:g}, {wrong:g} |")
    finally:
        scorer.close()


def scores(scorer: RewardScorer, each: PublicFormat) -> list[float | None]:
    """Return the rewards of the example's right and wrong response."""
    reward = RewardSettings(name="tests", code=CodeReward(tests_column=each.column, timeout=60.0))
    completions = [f"```python\n{program}\n```" for program in (each.right, each.wrong)]
    group = RewardGroup(0, "q", None, completions, [[1], [1]], ["stop", "stop"], each.row)
    return scorer.score([reward], [group], SamplingSettings()).totals[0]


if __name__ == "__main__":
    main()
