"""The comparison of policies with drafts and without, on a small scenario."""

from benchmarks.drafting.policies import ACCEPTANCES, compare, table
from tests.simulator.small_scenario import SMALL


def test_drafts_make_each_policy_faster() -> None:
    result = compare(SMALL, ACCEPTANCES[3], [0], (0.5,))
    names = [row["policy"] for row in result["policies"]]
    assert names[:2] == ["static", "static, drafts"]
    seconds = {row["policy"]: row["seconds"] for row in result["policies"]}
    assert seconds["static, drafts"] < seconds["static"]
    assert seconds["rlhfless, λ = 0.5, drafts"] < seconds["rlhfless, λ = 0.5"]
    lines = table([result]).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(names)
    assert "1.00×, 0%" in lines[-len(names)]
