"""The comparison of policies: baselines are tuned, and the tables go where a page has its marks."""

from pathlib import Path

from benchmarks.planning.policy_tables import write_tables
from benchmarks.planning.policy_variants import TUNED_RATIOS, compare, sweep_ratio, tune
from rlhfless_operator.simulator.policies import COMPLETE, POLICIES
from tests.simulator.small_scenario import SMALL


def test_baselines_are_tuned_on_each_scenario(tmp_path: Path) -> None:
    words, settings = tune(SMALL, "paper", [0])
    rows = {row["policy"]: row for row in sweep_ratio(SMALL, "paper", TUNED_RATIOS["paper"], [0])["policies"]}
    static = rows.pop("static")
    sums = {
        name: row["seconds"] / static["seconds"] + row["gpu_seconds"] / static["gpu_seconds"]
        for name, row in rows.items()
    }
    assert sums[words] == min(sums.values()) and settings.name == "paper"
    found = compare(SMALL, [0], [0])
    assert [row["policy"] for row in found["policies"]] == [*POLICIES, COMPLETE]
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- scenarios -->\nstale\n<!-- end of scenarios -->\nkept\n")
    write_tables({"scenarios": {"small": found}}, page)
    text = page.read_text()
    assert "stale" not in text and text.endswith("<!-- end of scenarios -->\nkept\n")
    assert "Tuned here: rlhfuse: τ = " in text
