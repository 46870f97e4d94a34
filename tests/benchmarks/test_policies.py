"""The whole comparison: in parts, each kept as soon as it is there."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.planning import policy_study
from benchmarks.planning.policy_limits import scenario_limits
from benchmarks.planning.policy_study import COMPARED, Part, parts, study
from benchmarks.planning.policy_tables import (
    limit_table,
    option_table,
    scenario_tables,
    sensitivity_tables,
    write_tables,
)
from benchmarks.planning.policy_variants import (
    TUNED_RATIOS,
    ablate,
    compare,
    effects,
    sweep,
    sweep_ratio,
    told,
    tune,
    with_ratio,
)
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.scenarios import SCENARIOS
from rlhfless_operator.simulator.simulate import simulate
from rlhfless_operator.simulator.step_bound import least_gpu_seconds
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import generate
from tests.simulator.small_scenario import SMALL

LENGTHS = dataclasses.replace(SMALL.lengths, longest=2400, runaways=0.05)


def test_the_study_has_every_scenario_every_option_and_every_sensitivity() -> None:
    names = {section: [part.name for part in parts([0], [0]) if part.section == section] for section in (
        "scenarios", "options", "effects", "told", "sensitivity"
    )}  # fmt: skip
    assert names["scenarios"] == list(SCENARIOS)
    assert names["options"] == names["effects"] == names["told"] == ["paper-3b-gsm8k-grpo"]
    for words in ("cost_weight", "τ of paper", "τ of rlhfuse", "lengths.noise", "lengths.runaways", "startup_seconds"):
        assert any(name.startswith(words) for name in names["sensitivity"]), words
    assert set(COMPARED) <= set(POLICIES)


def test_a_study_that_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[str] = []

    def fake(seeds: object, sweep_seeds: object) -> list[Part]:
        def run(name: str) -> dict[str, object]:
            runs.append(name)
            if name == "b" and len(runs) == 2:
                raise KeyboardInterrupt
            return {"scenario": name, "policies": []}

        return [Part("scenarios", name, lambda name=name: run(name)) for name in "abc"]

    monkeypatch.setattr(policy_study, "parts", fake)
    file = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        study(file, [0])
    seen: list[str] = []
    found = study(file, [0], on_part=lambda part, result: seen.append(part.name))
    assert runs == ["a", "b", "b", "c"], "what was there is not run again"
    assert seen == ["a", "b", "c"]
    assert json.loads(file.read_text()) == found


def test_sections_can_be_had_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        policy_study, "parts", lambda *seeds: [Part("scenarios", "a", dict), Part("sensitivity", "b", dict)]
    )
    assert study(None, [0], sections=["sensitivity"]) == {"sensitivity": {"b": {}}}


def test_each_means_is_shown_alone_and_left_out() -> None:
    names = [row["policy"] for row in ablate(SMALL, [0])["policies"]]
    assert names[0] == "none"
    assert sum(name.startswith("only") for name in names) == 4
    assert sum(name.startswith("without") for name in names) == 5


def test_each_mend_is_shown_alone_and_left_out_and_changes_something() -> None:
    scenario = dataclasses.replace(SMALL, max_batch=16, startup_seconds=0.5, lengths=LENGTHS)
    rows = {row["policy"]: row for row in effects(scenario, [0])["policies"]}
    assert next(iter(rows)) == "none"
    for words in ("only", "without"):
        assert sum(name.startswith(words) for name in rows) == 4
    figures = {name: (row["seconds"], row["gpu_seconds"]) for name, row in rows.items()}
    assert figures["without a forecast that knows waiting"] != figures["all"] != figures["none"]


def test_what_the_oracle_knows_is_told_one_thing_at_a_time() -> None:
    scenario = dataclasses.replace(SMALL, lengths=LENGTHS)
    rows = {row["policy"]: row for row in told(scenario, [0])["policies"]}
    (oracle,) = simulate(scenario, [0], policies=["oracle"])["policies"]
    (ours,) = simulate(scenario, [0], policies=["rlhfless"])["policies"]
    assert rows["oracle"] == oracle
    assert rows["rlhfless"] == ours
    assert len(rows) == 10


def test_ablations_and_sweeps_have_the_form_of_results() -> None:
    found = ablate(dataclasses.replace(SMALL, steps_per_epoch=1), [0])
    assert next(row["policy"] for row in found["policies"]) == "none"
    swept = sweep(SMALL, "lengths.runaways", [0.0, 0.05], [0], policies=["static"])
    assert [each["value"] for each in swept] == [0.0, 0.05]
    assert [each["value"] for each in sweep(SMALL, "startup_seconds", [1.0], [0], policies=["static"])] == [1.0]


def test_a_rule_with_a_ratio_is_compared_at_several() -> None:
    found = sweep_ratio(SMALL, "rlhfuse", [0.5, 0.9], [0])
    assert [row["policy"] for row in found["policies"]] == ["static", "τ = 0.5", "τ = 0.9"]
    with pytest.raises(ValueError, match="only paper, rlhfuse, rlhfuse-resident have a ratio"):
        with_ratio("static", 0.5)
    with pytest.raises(ValueError, match=r"ratio is 2"):
        sweep_ratio(SMALL, "paper", [2.0], [0])


def test_baselines_are_tuned_on_each_scenario() -> None:
    words, settings = tune(SMALL, "paper", [0])
    rows = {row["policy"]: row for row in sweep_ratio(SMALL, "paper", TUNED_RATIOS["paper"], [0])["policies"]}
    static = rows.pop("static")
    sums = {
        name: row["seconds"] / static["seconds"] + row["gpu_seconds"] / static["gpu_seconds"]
        for name, row in rows.items()
    }
    assert sums[words] == min(sums.values()) and settings.name == "paper"
    found = compare(SMALL, [0], [0])
    assert [row["policy"] for row in found["policies"]] == list(POLICIES)
    assert found["tuned"].keys() == {"rlhfuse", "rlhfuse-resident", "paper", "laminar"}
    assert "Tuned here: rlhfuse: τ = " in scenario_tables({"small": found})


def test_the_tables_replace_what_stands_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- scenarios -->\nold\n<!-- end of scenarios -->\nkept\n")
    row = dict.fromkeys(
        ("seconds", "seconds_std", "gpu_seconds", "gpu_seconds_std", "cost", "first_epoch_seconds"), 1.0
    )
    row |= {"policy": "static", "idle_share": 0.25, "lower_bound_share": 0.5, "first_epoch_gpu_seconds": 2000.0}
    ours = {**row, "policy": "rlhfless", "seconds": 0.5, "gpu_seconds": 0.4}
    result = {"scenario": "somewhere", "policies": [row, ours]}
    write_tables({"scenarios": {"somewhere": result}}, page)
    text = page.read_text()
    assert "old" not in text and text.endswith("<!-- end of scenarios -->\nkept\n")
    assert "| rlhfless | 0.5 ± 1.0 | 0 ± 1 | 1.000 | 25% | 50% | 2.00× | 60% | 1.0 s, 2,000 |" in text
    options = option_table({"somewhere": result})
    assert options.count("\n") == 4
    swept = {**result, "field": "cost_weight", "value": 0.5}
    found = sensitivity_tables({"cost_weight = 0.5": swept, "τ of paper": result})
    assert "| λ | 0.5 |" in found and "| paper | rlhfless |" in found
    with pytest.raises(ValueError, match="has no marks <!-- options -->"):
        write_tables({"options": {}}, page)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_policy_does_better_than_anyone_could(seed: int) -> None:
    trace = generate(SMALL.lengths, epochs=1, prompts=12, samples=4, seed=seed)
    lengths = dict(enumerate(trace.response_tokens[0].tolist()))
    for weight in (0.05, 0.5, 0.95):
        for settings in POLICIES.values():
            scenario = dataclasses.replace(SMALL, cost_weight=weight)
            step = run_policy(scenario, settings, trace, seed)[0]
            prompts = trace.prompt_tokens.tolist()
            least = least_gpu_seconds(scenario, lengths, prompts, step.seconds, starts=settings.starts)
            assert least <= step.gpu_seconds * (1 + 1e-9), settings.name


def test_the_limits_bind_in_both_directions() -> None:
    trace = generate(SMALL.lengths, epochs=1, prompts=12, samples=4, seed=0)
    lengths, prompts = dict(enumerate(trace.response_tokens[0].tolist())), trace.prompt_tokens.tolist()
    assert math.isinf(least_gpu_seconds(SMALL, lengths, prompts, 3.0)), "weights alone take that long"
    costs = [least_gpu_seconds(SMALL, lengths, prompts, seconds) for seconds in (11.0, 12.0, 15.0, 30.0)]
    assert costs == sorted(costs, reverse=True) and math.isfinite(costs[-1])
    found = scenario_limits(SMALL, [0], speed=1.01, saving=0.3)
    assert found["most_saving"] > 0 and found["most_speed"] > 0
    assert scenario_limits(SMALL, [0], speed=100.0, saving=0.999)["most_saving"] is None
    assert scenario_limits(SMALL, [0], speed=100.0, saving=0.999)["most_speed"] is None
    assert "| small | " in limit_table({"small": found})
