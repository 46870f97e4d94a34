"""The comparison of asynchronous systems: kept as it goes on, with the tables of its page."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.planning import asynchronous_policies as async_policies
from benchmarks.planning.asynchronous_policies import VERL_PUBLISHED, at_utilisation, beside_areal, beside_verl, study
from benchmarks.planning.policy_tables import asynchronous_tables, published_table
from rlhfless_operator.simulator.asynchronous.compare import compare
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS
from tests.simulator.small_scenario import SMALL


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_policies, "SCENARIOS", {"a": SMALL, "b": dataclasses.replace(SMALL, name="b")})
    for name in ("VERL", "AREAL"):
        of_peer = getattr(async_policies, name)
        tiny = dataclasses.replace(of_peer, prompts_per_step=4, samples_per_prompt=2, lengths=SMALL.lengths)
        monkeypatch.setattr(async_policies, name, tiny)


def test_a_study_that_was_interrupted_goes_on(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[str] = []

    def counted(scenario, *arguments, **others):
        runs.append(scenario.name)
        return compare(scenario, *arguments, **others)

    monkeypatch.setattr(async_policies, "compare", counted)
    console, file = Console(quiet=True), tmp_path / "results.json"
    study(file, ["a"], 1, 2, console)
    found = study(file, ["a", "b"], 1, 2, console)
    assert runs == ["small", "b"]
    kept = json.loads(file.read_text())
    assert kept["asynchronous"] == found["asynchronous"]
    assert len(kept["published"]) == len(VERL_PUBLISHED) + 1


def test_some_systems_are_run_again_and_the_others_keep_their_rows(small: None, tmp_path: Path) -> None:
    console, file = Console(quiet=True), tmp_path / "results.json"
    before = study(file, ["a"], 1, 2, console)["asynchronous"]["a"]["policies"]
    names = [row["policy"] for row in before]
    stored = json.loads(file.read_text())
    for row in stored["asynchronous"]["a"]["policies"]:
        row["seconds"] = 1e9
    stored["asynchronous"]["a"]["policies"] = [
        row for row in stored["asynchronous"]["a"]["policies"] if row["policy"] != "rlhfless-async-1"
    ]
    file.write_text(json.dumps(stored))
    after = study(file, ["a"], 1, 2, console, ["rlhfless-async-1"])["asynchronous"]["a"]["policies"]
    assert [row["policy"] for row in after] == names
    again = {"static", "rlhfless", "rlhfless-async-1"}
    assert {row["policy"] for row in after if row["seconds"] < 1e9} == again
    assert [row for row in after if row["policy"] in again] == [row for row in before if row["policy"] in again]


def test_tables_have_every_scenario_and_every_policy(small: None) -> None:
    results = {"a": compare(SMALL, [0], steps=2), "b": compare(SMALL, [0], steps=2)}
    lines = asynchronous_tables(results).splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith(("| a", "| b |"))][-2:] == ["| a", "| b"]
    assert all(any(line.startswith(f"| {name} |") for line in lines) for name in ("static", "rlhfless", *SYSTEMS))


def test_published_settings_take_as_long_as_was_measured() -> None:
    scenario = at_utilisation(SMALL, 10_000.0, learning=30.0, preparation=12.0)
    learning = scenario.learning_gpu_seconds(10_000.0) / scenario.gpus + scenario.update_seconds
    assert learning == pytest.approx(30.0)
    assert scenario.preparation_gpu_seconds(10_000.0) / scenario.gpus == pytest.approx(12.0)
    without = at_utilisation(SMALL, 10_000.0, learning=30.0, preparation=None)
    assert without.preparation_gpu_seconds(10_000.0) < 1e-3


def test_peers_are_simulated_beside_what_they_measured(small: None) -> None:
    first = VERL_PUBLISHED[0]
    row = beside_verl(first, steps=2)
    # The pass of the old policy and the update are as long as was measured, whatever generation takes.
    assert row["synchronous"]["measured"] == 790.10
    assert row["synchronous"]["simulated"] > first.learning + first.old_policy
    scaled, measured = row["asynchronous"]
    assert (scaled["measured"], measured["measured"]) == (294.77, 294.77)
    assert scaled["simulated"] > measured["simulated"] >= first.asynchronous_learning * 0.99
    table = published_table({"verl": row, "areal": beside_areal(steps=2)})
    assert table.count("| verl |") == table.count("| areal |") == 2
    assert "| 2.68× |" in table
    assert "| 2.77× |" in table
