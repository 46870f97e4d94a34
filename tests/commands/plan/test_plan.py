"""`rlhfless plan`: the forecast of a job, and what it says of what cannot be."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from rlhfless_operator import cli
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.reading.overrides import override
from rlhfless_operator.job.reading.yaml_document import read_document
from rlhfless_operator.simulator.traces import LengthStatistics, generate, write_trace
from tests.clusters.control_plane import control_plane
from tests.commands.plan.forecasts import forecast, refusal
from tests.prerequisites import needs_api_server


def test_a_step_is_forecast_at_several_weights(job: Path) -> None:
    found = forecast(job, "--gpu", "L40S")
    assert [row["cost_weight"] for row in found["plans"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert (found["model"], found["measured"], found["instance_hour"]) == ("Qwen2.5-7B", True, "4.00")
    for row in [*found["plans"], *found["front"]]:
        assert 1 <= row["actors"] <= 8
        assert row["lower_bound_gpu_seconds"] <= row["gpu_seconds"]
        assert Decimal(row["cost"]) == pytest.approx(Decimal(row["gpu_seconds"]) * 4 / 3600, abs=Decimal("1e-4"))
    seconds = [row["seconds"] for row in found["plans"]]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_each_stage_is_forecast_at_its_own_price(job: Path) -> None:
    stages = "spec.prices.stages={generation: '4.00', preparation: '8.00', learning: '40.00'}"
    even, own = forecast(job, "--gpu", "L40S"), forecast(edited(job, stages), "--gpu", "L40S")
    assert (own["instance_hour"], own["priced_by"], even["priced_by"]) == ("4.00", "prices", "prices.instanceHour")
    preparation, learning = own["preparation_seconds"], own["learning_seconds"] + 0.5
    for row in own["plans"]:
        others = preparation + learning
        money = 4 * (row["gpu_seconds"] - others) + 8 * preparation + 40 * learning
        assert float(row["cost"]) == pytest.approx(money / 3600, abs=1e-4)
    budget = own["front"][0]["cost"]
    found = forecast(edited(job, stages), "--gpu", "L40S", "--budget", budget)["within_budget"]
    assert Decimal(found["cost"]) <= Decimal(budget)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("{money: '0.01'}", r"spec.budget.money: not enough for one step: .* the cheapest plan costs 0.\d+ a step"),
        ("{gpuHours: 0.001}", r"spec.budget.gpuHours: not enough for one step: .* takes 0.\d+ GPU-hours a step"),
    ],
)
def test_a_budget_of_the_job_below_one_step_is_refused(job: Path, budget: str, words: str) -> None:
    assert forecast(edited(job, "spec.budget={money: '100.00', gpuHours: 100}"), "--gpu", "L40S")["plans"]
    assert re.search(words, refusal(edited(job, f"spec.budget={budget}"), "--gpu", "L40S"))


def edited(job: Path, setting: str) -> Path:
    """The job with one value set."""
    document, faults = override(read_document(job.read_text()), [setting])
    assert not faults
    job.write_text(yaml.safe_dump(document.content))
    return job


def test_a_better_gpu_is_faster_and_more_of_them_too(job: Path) -> None:
    fastest = {
        options: forecast(job, *options)["plans"][0]["seconds"]
        for options in (("--device", "L40S"), ("--device", "H100"), ("--gpu", "H100", "--tensor-parallel", "2"))
    }
    assert sorted(fastest.values(), reverse=True) == list(fastest.values())


def test_a_deadline_and_a_budget_are_kept(job: Path) -> None:
    front = forecast(job, "--gpu", "L40S")["front"]
    middle = front[len(front) // 2]
    found = forecast(job, "--gpu", "L40S", "--deadline", f"{middle['seconds']:.3f}s", "--budget", middle["cost"])
    assert found["within_deadline"]["seconds"] <= middle["seconds"] + 0.001
    assert Decimal(found["within_budget"]["cost"]) <= Decimal(middle["cost"])


def test_lengths_are_those_of_an_earlier_run(job: Path, tmp_path: Path) -> None:
    for name, median in (("short", 50), ("long", 800)):
        lengths = LengthStatistics(median=median, longest=2048)
        write_trace(tmp_path / f"{name}.parquet", generate(lengths, epochs=1, prompts=40, samples=8, seed=0))
    short, long = (
        forecast(job, "--gpu", "L40S", "--trace", str(tmp_path / f"{name}.parquet")) for name in ("short", "long")
    )
    assert short["plans"][-1]["gpu_seconds"] < long["plans"][-1]["gpu_seconds"]
    assert "short.parquet, 40 prompts" in short["lengths"]


def test_a_rehearsal_says_what_to_forecast(job: Path, tmp_path: Path) -> None:
    lengths = LengthStatistics(median=50, longest=100)
    write_trace(job.parent / "trace.parquet", generate(lengths, epochs=1, prompts=40, samples=8, seed=0))
    text = job.read_text()
    job.write_text(f"{text}  rehearsal: {{trace: trace.parquet, gpu: H100, gpus: 2, startup: 5s}}\n")
    found = forecast(job)
    assert (found["gpu"], found["gpus"], found["startup_seconds"]) == ("H100", 2, 5.0)
    assert "trace.parquet" in found["lengths"]


@pytest.mark.parametrize("width", [None, "80"])
def test_no_figure_is_cut_off_in_a_file_or_in_a_narrow_terminal(job: Path, width: str | None) -> None:
    environment = {"COLUMNS": width}
    made = CliRunner().invoke(cli.app, ["plan", str(job), "--gpu", "A100"], env=environment)
    assert made.exit_code == 0, made.exception
    assert "…" not in made.stdout
    assert max(map(len, made.stdout.splitlines())) <= (80 if width else 160)
    if width is None:
        assert "GPU-seconds" in made.stdout


def test_the_tables_name_everything(job: Path) -> None:
    made = CliRunner().invoke(cli.app, ["plan", str(job), "--gpu", "A100", "--deadline", "10m"], env={"COLUMNS": "160"})
    assert made.exit_code == 0, made.exception
    for text in ("Qwen2.5-7B on 1 × A100", "λ = 0.5", "within the deadline", "From the fastest to the cheapest", "USD"):
        assert text in made.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "gpu is missing: give --gpu, one of A100, H100, H200, L40S; no pool's accelerator (RLHFLESS_POOLS)"),
        (("--gpu", "B300"), "gpu is 'B300': choose one of L40S, A100, H100, H200"),
        (("--gpu", "L40S", "--gpus", "0"), "gpus is 0: an instance has at least 1"),
        (("--gpu", "L40S", "--gpus", "1", "--model", "Llama-2-70B"), "does not fit 1 × L40S; use at least 4"),
        (("--gpu", "L40S", "--model", "nobody/model"), "model is 'nobody/model', which is no folder here"),
        (
            ("--gpu", "L40S", "--lambda", "1.5"),
            "lambda is 1.5: it is between 0, for time alone, and 1, for cost alone;",
        ),
        (("--gpu", "L40S", "--lambda", "-1"), "the nearest is 0"),
        (("--gpu", "L40S", "--deadline", "1s"), "deadline is 1 s: the fastest plan on 8 instances takes"),
        (("--gpu", "L40S", "--deadline", "soon"), "deadline: 'soon' is not a duration"),
        (("--gpu", "L40S", "--budget", "0.0001"), "budget is 0.0001: the cheapest plan costs"),
        (("--gpu", "L40S", "--budget", "much"), "budget: 'much' is not a price"),
        (("--gpu", "L40S", "--median-tokens", "5000"), "median_tokens is 5000: it is above 0 and at most"),
        (("--gpu", "L40S", "--trace", "nowhere"), "nowhere holds no trace"),
    ],
)
def test_what_cannot_be_forecast_is_named(job: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refusal(job, *options)


@pytest.mark.parametrize(
    ("responses", "message"),
    [([], "is empty; name a trace with a row for each response"), ([-3], "response_tokens in")],
)
def test_a_bad_trace_is_named(job: Path, tmp_path: Path, responses: list[int], message: str) -> None:
    columns = {name: [0] * len(responses) for name in ("prompt", "epoch", "sample", "prompt_tokens")}
    columns["response_tokens"] = responses
    table = pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})
    pq.write_table(table, tmp_path / "t.parquet")
    assert message in refusal(job, "--gpu", "L40S", "--trace", str(tmp_path / "t.parquet"))


# --- GPUs that are not named ---

UNBOUND = "spec.generation.instances.max=null"


def put_gpus(place: Path, *products: str) -> None:
    """Let nvidia-smi list these."""
    lines = [f"echo '{number}, GPU-{number}, {product}'" for number, product in enumerate(products)]
    numbers = [f"echo {number}" for number in range(len(products))]
    tool = place / "nvidia-smi"
    branches = "\n".join(["#!/bin/sh", 'case "$1" in *name*)', *lines, ";; *)", *numbers, ";; esac"])
    tool.write_text(f"{branches}\n")
    tool.chmod(0o755)


def test_this_machines_gpus_are_forecast_for(job: Path, nothing_is_near: Path) -> None:
    put_gpus(nothing_is_near, *["NVIDIA H100 80GB HBM3"] * 4)
    found = forecast(job, "--set", UNBOUND)
    assert (found["gpu"], found["gpus"], found["actors_at_most"]) == ("H100", 1, 4)
    assert found["actors_by"] == "this machine's GPUs"
    pairs = forecast(job, "--set", UNBOUND, "--set", "spec.generation.vllm.tensorParallelSize=2")
    assert (pairs["gpus"], pairs["actors_at_most"]) == (2, 2)
    assert forecast(job)["actors_by"] == "generation.instances.max"


def test_a_gpu_that_is_named_comes_before_what_there_is(job: Path, nothing_is_near: Path) -> None:
    put_gpus(nothing_is_near, "NVIDIA H100 80GB HBM3")
    found = forecast(job, "--gpu", "L40S", "--set", UNBOUND)
    assert (found["gpu"], found["actors_at_most"]) == ("L40S", 1)
    assert found["actors_by"].startswith("nothing here tells how many GPUs there are: --set spec.generation.instances")


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (
            ("NVIDIA H100 80GB HBM3", "NVIDIA L40S"),
            "this machine has NVIDIA H100 80GB HBM3 and NVIDIA L40S; give",
        ),
        (
            ("NVIDIA B200",),
            "this machine has NVIDIA B200, of which there is no data sheet here; give --gpu the",
        ),
    ],
)
def test_gpus_that_cannot_be_forecast_for_are_named(
    job: Path, nothing_is_near: Path, products: tuple[str, ...], message: str
) -> None:
    put_gpus(nothing_is_near, *products)
    assert message in refusal(job)


@pytest.mark.parametrize(
    ("pods", "namespace", "actors"), [({}, "team", 12), ({"nvidia.com/gpu": 2}, "team", 6), ({}, "small", 3)]
)
def test_a_pool_says_what_its_gpus_are_and_how_many(
    job: Path, monkeypatch: pytest.MonkeyPatch, pods: dict[str, int], namespace: str, actors: int
) -> None:
    pool = {"gpus": 12, "accelerator": "NVIDIA-H200", "namespaces": {"small": 3}}
    monkeypatch.setenv("RLHFLESS_POOLS", json.dumps({"h200": pool}))
    limits = f"spec.pods.resources.limits={json.dumps(pods)}"
    found = forecast(
        job, "--set", UNBOUND, "--set", "spec.pool=h200", "--set", limits, "--set", f"metadata.namespace={namespace}"
    )
    assert (found["gpu"], found["actors_at_most"], found["actors_by"]) == ("H200", actors, "pool h200")


def test_bad_pools_are_named(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFLESS_POOLS", '{"h200": {}}')
    with pytest.raises(UserError, match=r"RLHFLESS_POOLS.h200.gpus: missing; set it"):
        CliRunner().invoke(cli.app, ["plan", str(job)], catch_exceptions=False)


@needs_api_server("no nodes are listed")
def test_the_nodes_of_a_cluster_say_what_they_have(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with control_plane(tmp_path) as server:
        for name, product in (("a", "NVIDIA-L40S"), ("b", "NVIDIA-L40S"), ("c", None)):
            labels = {"nvidia.com/gpu.product": product} if product else {}
            body = {"metadata": {"name": name, "labels": labels}}
            assert server.request("POST", "/api/v1/nodes", body)[0] == 201
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        assert forecast(job)["gpu"] == "L40S"


def test_a_model_is_known_by_its_name_on_the_hub(job: Path) -> None:
    assert forecast(job, "--gpu", "H100", "--set", "spec.model.source=Qwen/Qwen3-8B")["model"] == "Qwen3-8B"
    message = refusal(job, "--gpu", "H100", "--set", "spec.model.source=nobody/model")
    assert "the hub could not be asked (HF_HUB_OFFLINE is set): give the folder" in message


def test_what_drafting_brought_an_earlier_run_is_told(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "earlier"
    statistics = LengthStatistics(median=100, longest=1000, prompt_median=50, prompt_longest=100)
    folder.mkdir()
    write_trace(folder / "lengths.parquet", generate(statistics, epochs=1, prompts=16, samples=4, seed=0))
    lines = [{"step": step, "metrics": {"generation/tokens_per_pass": 1.0 if step < 3 else 2.5}} for step in range(11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = forecast(job, "--gpu", "L40S", "--trace", str(folder), "--set", "spec.generation.drafting=auto")
    assert (found["drafting"], found["tokens_per_pass"]) == ("auto", 2.5)
    options = ["plan", str(job), "--gpu", "L40S", "--trace", str(folder), "--set", "spec.generation.drafting=auto"]
    told = CliRunner().invoke(cli.app, options).stdout
    assert "2.50 tokens a pass" in told and "counts one token a pass" in " ".join(told.split())
    assert "drafting:" not in CliRunner().invoke(cli.app, [*options[:-1], "spec.generation.drafting=never"]).stdout


def test_a_forecast_takes_as_long_as_the_engine_did_in_the_run_of_its_lengths(job: Path, tmp_path: Path) -> None:
    statistics = LengthStatistics(median=100, longest=1000, prompt_median=50, prompt_longest=100)
    write_trace(tmp_path / "lengths.parquet", generate(statistics, epochs=1, prompts=16, samples=4, seed=0))
    options = ("--gpu", "L40S", "--trace", str(tmp_path))
    plain = forecast(job, *options)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"metrics": {"generation/engine_factor": 2.0}}) + "\n")
    slower = forecast(job, *options)
    assert (plain["engine_factor"], slower["engine_factor"]) == (None, 2.0)
    assert min(row["generation_seconds"] for row in slower["front"]) > min(
        row["generation_seconds"] for row in plain["front"]
    )
    told = " ".join(CliRunner().invoke(cli.app, ["plan", str(job), *options]).stdout.split())
    assert "generation: 2.00 times as long as by the GPU's table" in told


def test_a_forecast_counts_how_samples_acted_in_the_run_of_its_lengths(job: Path, tmp_path: Path) -> None:
    statistics = LengthStatistics(median=100, longest=1000, prompt_median=50, prompt_longest=100)
    write_trace(tmp_path / "lengths.parquet", generate(statistics, epochs=1, prompts=16, samples=4, seed=0))
    options = ["--gpu", "L40S", "--trace", str(tmp_path)]
    options += ["--set", "spec.environment={openenv: {url: 'http://maze'}}"]
    alone = forecast(job, *options[:-2])
    unknown = forecast(job, *options)
    acted = {"environment/turns": 4, "environment/seconds_away": 50.0, "environment/given": 300.0, "lengths": 100.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"metrics": acted}) + "\n")
    known = forecast(job, *options)
    assert (alone["acts"], unknown["acts"], unknown["acting"]) == (False, True, None)
    assert known["acting"] == {"away": 0.5, "given": 3.0}
    assert alone["ahead"] and not known["ahead"], "its rows would count no time in environments"
    fastest, before = known["front"][0], unknown["front"][0]
    # The longest response has 1,000 tokens at most; what is given is read in preparation and learning as well.
    assert before["generation_seconds"] + 100 < fastest["generation_seconds"]
    assert known["learning_seconds"] > 2 * unknown["learning_seconds"]
    told = " ".join(CliRunner().invoke(cli.app, ["plan", str(job), *options]).stdout.split())
    assert "a sample is away for 0.5 s, and is given 3 tokens, for each token that it samples" in told
    assert "Rollouts that go ahead" not in told and "rollouts that go ahead of the learner are not forecast" in told


def test_a_forecast_drafts_as_the_run_did_whose_lengths_it_has(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "earlier"
    statistics = LengthStatistics(median=100, longest=1000, prompt_median=50, prompt_longest=100)
    folder.mkdir()
    write_trace(folder / "lengths.parquet", generate(statistics, epochs=1, prompts=16, samples=4, seed=0))
    steps = [{}] * 3 + [{"generation/drafts/coverage": 0.5, "generation/drafts/acceptance": 0.8}] * 8
    lines = [{"step": step, "metrics": metrics} for step, metrics in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--gpu", "L40S", "--trace", str(folder), "--set"]
    plain = forecast(job, *options, "spec.generation.drafting=never")
    # vLLM drafts nothing where a model has several GPUs.
    several = "spec.generation.vllm={tensorParallelSize: 2}"
    assert forecast(job, *options, "spec.generation.drafting=auto", "--set", several)["drafts"] is None
    for engine in ("transformers", "vllm"):
        chosen = ["--set", f"spec.generation.engine={engine}"]
        drafted = forecast(job, *options, "spec.generation.drafting=auto", *chosen)
        assert drafted["drafts"] == pytest.approx({"coverage": 0.5, "acceptance": 0.8})
    better = forecast(job, *options, "spec.generation.drafting=auto", "--acceptance", "0.9")
    for found, than in ((drafted, plain), (better, drafted)):
        assert found["plans"][0]["seconds"] < than["plans"][0]["seconds"]
        assert all(row["lower_bound_gpu_seconds"] <= row["gpu_seconds"] for row in found["front"])


def test_an_acceptance_that_does_not_fit_is_refused(job: Path) -> None:
    assert "acceptance is 1.2: a chance is between 0 and 1; the nearest is 1" in refusal(
        job, "--gpu", "L40S", "--acceptance", "1.2"
    )
    assert "generation.drafting is never: set it to auto" in refusal(job, "--gpu", "L40S", "--acceptance", "0.5")


def test_a_job_is_compared_with_itself_with_rollouts_that_go_ahead(job: Path) -> None:
    rows = forecast(job, "--gpu", "H100")["ahead"]
    assert [row["max_staleness"] for row in rows] == [0, 1, 2]
    without, one, two = rows
    assert without["staleness"] == 0 and 0 < one["staleness"] <= 1
    # Two steps at most are under way with a staleness of 1.
    assert without["seconds"] / 2 * (1 - 1e-9) <= one["seconds"] < without["seconds"]
    assert one["seconds"] >= two["seconds"]
    assert one["learning_busy"] > without["learning_busy"]
    ahead = job.with_name("async.yaml")
    document = yaml.safe_load(job.read_text())
    document["spec"]["async"] = {"maxStaleness": 4}
    ahead.write_text(yaml.safe_dump(document))
    assert [row["max_staleness"] for row in forecast(ahead, "--gpu", "H100")["ahead"]] == [0, 1, 2, 4]


def test_enough_actors_leave_the_learner_no_time_to_wait(job: Path) -> None:
    found = forecast(job, "--gpu", "H100", "--median-tokens", "100")
    *fewer, row = found["beside"]
    assert [each["actors"] for each in found["beside"]] == sorted({each["actors"] for each in found["beside"]})
    assert found["matching_actors"] in (None, row["actors"], *[each["actors"] for each in fewer[-1:]])
    shown = CliRunner().invoke(cli.app, ["plan", str(job), "--gpu", "H100"]).stdout
    assert "Actors beside the learner, with maxStaleness: 1" in shown


def test_a_learner_with_more_gpus_needs_more_actors(job: Path) -> None:
    slow, quick = (forecast(job, "--gpu", "L40S", "--set", f"spec.learning.processes={count}") for count in (1, 8))
    assert quick["learning_seconds"] == pytest.approx(slow["learning_seconds"] / 8)
    assert (slow["learner_gpus"], quick["learner_gpus"]) == (1, 8)
    assert slow["matching_actors"] < (quick["matching_actors"] or 99)
    shown = CliRunner().invoke(cli.app, ["plan", str(job), "--gpu", "L40S"]).stdout
    assert f"From {slow['matching_actors']} actor" in shown


# --- memory ---


def test_a_step_has_the_time_to_publish_its_weights(job: Path) -> None:
    adapter = forecast(job, "--gpu", "H200")
    assert adapter["publishing_seconds"] < 1
    whole = edited(job, "spec.model.lora=null")
    one, four = (
        forecast(edited(whole, f"spec.learning.processes={gpus}"), "--gpu", "H200")["publishing_seconds"]
        for gpus in (2, 8)
    )
    assert one == pytest.approx(7.6e9 * 2 / 0.85e9 / 2, rel=0.02)
    assert four == pytest.approx(one / 4)


def test_the_learner_is_forecast_beside_generation_where_the_job_lets_it(job: Path) -> None:
    beside = forecast(edited(job, "spec.planning.policy=cost"), "--gpu", "L40S")
    after = forecast(edited(job, "spec.learning.overlap=never"), "--gpu", "L40S")
    assert beside["learns_beside"] and not after["learns_beside"]
    for sooner, later in zip(beside["plans"], after["plans"], strict=True):
        assert sooner["seconds"] < later["seconds"]
    for row in after["plans"]:
        rest = after["learning_seconds"] + after["publishing_seconds"] + 0.25
        assert row["seconds"] == pytest.approx(row["generation_seconds"] + rest)
