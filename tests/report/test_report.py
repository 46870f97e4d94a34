"""report.html and comparisons of runs."""

import json
import math
import re
import uuid
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_functions.artifacts import exists, join, read_bytes, write_bytes
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.metric_catalogue import STEP_METRICS
from rlhfless_operator.records.record import SampleRecord
from rlhfless_operator.report import compare, model_card, write_comparison, write_report
from rlhfless_operator.report.learning import smoothed
from rlhfless_operator.report.samples import MOST_STEPS, samples_section, shared_lines, training_section
from tests.report.builders import job

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Outline(HTMLParser):
    """Checks that every element is closed in order, and collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def metrics_line(step: int) -> dict[str, Any]:
    account = {"starting": 0.5, "busy": 1.0, "idle": 0.25, "draining": 0.1, "cost": "0.000051"}
    return {
        "step": step,
        "seconds": 2.0,
        "stages": {"generation": 0.5, "preparation": 0.5, "learning": 0.9, "overhead": 0.1},
        "metrics": {"reward": 0.4 + 0.1 * step, "kl/reference": 0.001 * step, "lengths/mean": 50.0, "odd/one": None},
        "ledger": {"generation": account, "learning": account},
        "plan": {"policy": "cost", "actors": 2, "expected_seconds": 0.5},
        "evaluation": {"reward": 0.9} if step == 4 else None,
    }


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_run(folder: str, name: str = "tiny", **spec: Any) -> str:
    """A finished run of four steps."""
    write_bytes(join(folder, "job.yaml"), yaml.safe_dump(job(name, **spec)).encode())
    steps = [{"step": 0, "evaluation": {"reward": 0.4}}, *(metrics_line(step) for step in range(1, 5))]
    write_bytes(join(folder, "metrics.jsonl"), lines(steps))
    spans = [
        {"instance": "generation-a", "stage": "generation", "state": "starting", "start": 0.0, "end": 1.0},
        {"instance": "generation-a", "stage": "generation", "state": "busy", "start": 1.0, "end": 3.0},
        {"instance": "learning-b", "stage": "learning", "state": "busy", "start": 3.0, "end": 9.0},
    ]
    write_bytes(join(folder, "ledger.jsonl"), lines(spans))
    samples = [
        {"when": "before", "prompt": "Q:1+1", "response": "<script>alert(1)</script>", "reward": 0.0, "tokens": 9},
        {"when": "after", "prompt": "Q:1+1", "response": "#2 & done", "reward": 1.0, "tokens": 5},
        {"when": "training", "step": 2, "row": 0, "prompt": "Q:1+2", "response": "#of training", "reward": 0.5},
    ]
    write_bytes(join(folder, "samples.jsonl"), lines(samples))
    summary = {
        "name": name,
        "algorithm": "ppo",
        "steps": 4,
        "seconds": 8.5,
        "instance_seconds": 14.8,
        "cost": "0.000408",
    }
    write_bytes(join(folder, "summary.json"), json.dumps({**summary, "currency": "CHF"}).encode())
    return folder


@pytest.fixture
def memory() -> str:
    return f"memory://reports-{uuid.uuid4().hex}"


def test_the_report_is_written_beside_the_run_whatever_store_it_is_in(memory: str) -> None:
    uri = write_report(write_run(memory))
    assert uri == join(memory, "report.html")
    assert b"<!doctype html>" in read_bytes(uri)


def test_the_report_tells_what_was_learnt_what_it_cost_and_what_was_configured(tmp_path: Path) -> None:
    page = Outline(read_bytes(write_report(write_run(str(tmp_path)))).decode())
    for part in ("0.400 → 0.900", "0.500 → 0.800", "0.00041 CHF", "KL to the reference", "Seconds of each step"):
        assert part in page.text
    for part in ("Cost of each step", "Instance-seconds by state", "generation", "exactMatch"):
        assert part in page.text
    titles = {attributes.get("title") for tag, attributes in page.tags if tag == "td"}
    assert STEP_METRICS["kl/reference"].meaning in titles
    assert "nats per token" in page.text
    for part in ("Instance-seconds paid, and the least in hindsight", "all stages9.09.01.00"):
        assert part in page.text
    for part in ("Samples of training", "step 2, prompt 0", "#of training"):
        assert part in page.text
    assert "odd/one" not in page.text
    styles = [attributes.get("class") for tag, attributes in page.tags if tag == "rect"]
    assert {"fill starting", "fill busy"} <= set(styles)


def test_a_job_with_several_rewards_has_a_curve_of_each(tmp_path: Path) -> None:
    rewards = [{"name": name, "exactMatch": {}} for name in ("exact", "brief")]
    one, two = (write_run(str(tmp_path / str(count)), rewards=rewards[:count]) for count in (1, 2))
    assert "Mean of each reward" not in read_bytes(write_report(two)).decode(), "as in a rehearsal"
    for folder in (one, two):
        records = [metrics_line(step) for step in (1, 2)]
        for record in records:
            record["metrics"] |= {"reward/exact": 0.25 * record["step"], "reward/brief": -0.125 * record["step"]}
        write_bytes(join(folder, "metrics.jsonl"), lines(records))
    assert "Mean of each reward" not in read_bytes(write_report(one)).decode()
    page = Outline(read_bytes(write_report(two)).decode()).text
    assert "Mean of each reward" in page
    assert "exact: 0.25\nbrief: -0.125" in page


def test_the_report_says_which_steps_taught_nothing(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path))
    steps = [metrics_line(step) for step in range(1, 9)]
    for line in steps:
        line["metrics"]["batch/teaching_groups"] = float(line["step"] not in (2, 5, 6, 7))
    write_bytes(join(folder, "metrics.jsonl"), lines(steps))
    page = Outline(read_bytes(write_report(folder)).decode())
    assert page.text.count("had nothing to learn from") == 1
    assert (
        "steps 5 to 7 had nothing to learn from: all samples of each group got the same reward, 1.1 on average"
        in page.text
    )


def test_the_report_says_in_how_many_steps_engine_and_learner_disagreed(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path))
    steps = [metrics_line(step) for step in range(1, 5)]
    for line in steps:
        line["metrics"] |= {"mismatch/mean_exp_abs": 1.0 + (line["step"] == 3), "mismatch/explained": 1.05}
    write_bytes(join(folder, "metrics.jsonl"), lines(steps))
    page = Outline(read_bytes(write_report(folder)).decode())
    assert "in 1 of 4 steps, most in step 3: engine and learner give the sampled tokens other" in page.text


def test_the_report_of_a_job_out_of_budget_says_so_and_what_the_whole_job_takes(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path))
    money = {"cost": "2.50", "forecast_cost": "6.25", "budget_used": 0.833333, "currency": "CHF"}
    write_bytes(join(folder, "summary.json"), json.dumps({"name": "tiny", "steps": 4, **money}).encode())
    status = {"phase": "Suspended", "message": "step 5 is not begun: raise spec.budget.money to go on"}
    write_bytes(join(folder, "status.json"), json.dumps(status).encode())
    text = Outline(read_bytes(write_report(folder)).decode()).text
    for part in ("Suspended: step 5 is not begun", "6.25 CHF", "cost of the whole job", "83.3 %", "of it is spent"):
        assert part in text


def test_the_report_has_the_states_that_instances_were_in(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path))
    line = metrics_line(1)
    line["ledger"]["learning"] = {"busy": 1.0, "switching": 0.5, "asleep": 20.0, "cost": "0.000051"}
    write_bytes(join(folder, "metrics.jsonl"), lines([line]))
    spans = [
        {"instance": "learning-b", "stage": "learning", "state": "asleep", "start": 0.0, "end": 1.0},
        {"instance": "learning-b", "stage": "learning", "state": "switching", "start": 1.0, "end": 3.0},
    ]
    write_bytes(join(folder, "ledger.jsonl"), lines(spans))
    page = Outline(read_bytes(write_report(folder)).decode())
    assert {"fill switching", "fill asleep"} <= {found.get("class") for tag, found in page.tags if tag == "rect"}
    for part in ("switching", "asleep", "charged", "20.0", "1.5"):
        assert part in page.text


def test_the_report_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    text = read_bytes(write_report(write_run(str(tmp_path)))).decode()
    page = Outline(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "onload")]
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_what_models_write_is_text_and_never_markup(tmp_path: Path) -> None:
    page = Outline(read_bytes(write_report(write_run(str(tmp_path)))).decode())
    assert "<script>alert(1)</script>" in page.text
    assert "#2 & done" in page.text


def test_a_currency_that_is_none_is_no_markup(memory: str) -> None:
    folder = write_run(join(memory, "tiny"))
    summary = json.loads(read_bytes(join(folder, "summary.json")))
    write_bytes(join(folder, "summary.json"), json.dumps(summary | {"currency": "<script>x</script>"}).encode())
    page = Outline(read_bytes(write_report(folder)).decode())
    assert "script" not in [tag for tag, _ in page.tags]


def test_neither_the_report_nor_the_card_tells_strangers_a_jobs_secrets(tmp_path: Path) -> None:
    secret = "S3CRET"
    pods = {"env": {"WANDB_API_KEY": secret}, "template": {"metadata": {"annotations": {"a": secret}}}}
    judge = [{"name": "judge", "http": {"url": f"https://me:{secret}@judge/score?key={secret}"}}]
    spec = {"pods": pods, "learning": {"pods": pods}, "rewards": judge}
    folder = write_run(str(tmp_path / "tiny"), **spec)
    assert secret not in read_bytes(write_report(folder)).decode()
    assert secret not in model_card(RLHFJob.model_validate(job(**spec)), {})


def test_colours_follow_the_readers_scheme(tmp_path: Path) -> None:
    text = read_bytes(write_report(write_run(str(tmp_path)))).decode()
    assert "prefers-color-scheme: dark" in text
    declared = set(re.findall(r"(--[a-z0-9]+):", text))
    assert set(re.findall(r"var\((--[a-z0-9]+)\)", text)) <= declared


def test_a_run_that_has_just_begun_has_a_report_too(memory: str) -> None:
    write_bytes(join(memory, "job.yaml"), yaml.safe_dump(job()).encode())
    page = Outline(read_bytes(write_report(memory)).decode())
    assert "No step is finished yet." in page.text


def test_an_interrupted_run_says_so_and_a_torn_last_line_is_no_harm(memory: str) -> None:
    write_run(memory)
    whole = read_bytes(join(memory, "metrics.jsonl"))
    write_bytes(join(memory, "metrics.jsonl"), whole + b'{"step": 5, "secon')
    status = {"phase": "Interrupted", "message": "run the job again to go on"}
    write_bytes(join(memory, "status.json"), json.dumps(status).encode())
    page = Outline(read_bytes(write_report(memory)).decode())
    assert "Interrupted: run the job again to go on" in page.text


def test_a_step_that_was_finished_twice_counts_once(memory: str) -> None:
    write_run(memory)
    again = json.dumps({**metrics_line(3), "metrics": {"reward": 0.123}}).encode() + b"\n"
    write_bytes(join(memory, "metrics.jsonl"), read_bytes(join(memory, "metrics.jsonl")) + again)
    assert re.search(r"│ ?steps +│ 4 ", compare([memory]))


def test_a_damaged_file_is_named_with_its_line_and_nothing_is_written(memory: str) -> None:
    write_run(memory)
    write_bytes(join(memory, "ledger.jsonl"), b'{"instance": "a"}\n{"instance": "b"}\n')
    with pytest.raises(ValueError, match=r"ledger\.jsonl, line 1: stage: .*required"):
        write_report(memory)
    assert not exists(join(memory, "report.html"))


@pytest.mark.parametrize("name", ["summary.json", "job.yaml"])
def test_a_damaged_document_is_named(memory: str, name: str) -> None:
    write_run(memory)
    write_bytes(join(memory, name), b"{ not [ closed")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        write_report(memory)


def test_a_folder_without_a_run_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run: it has no job\.yaml; name the folder"):
        write_report(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_smoothing_keeps_constants_and_gaps() -> None:
    assert smoothed([2.0] * 50) == [2.0] * 50
    assert math.isnan(smoothed([1.0, math.nan] * 30)[1])


def test_smoothing_evens_out_noise_and_leaves_a_short_run_alone() -> None:
    assert smoothed([0.0, 1.0] * 3) == [0.0, 1.0] * 3
    assert all(0.3 < value < 0.7 for value in smoothed([0.0, 1.0] * 40))


# --- samples -----------------------------------------------------------------------------------------------------


def test_what_all_prompts_begin_with_is_shown_once() -> None:
    instruction = "Work out the sum and put the result after a hash sign.\n"
    prompts = [f"{instruction}Q:1+{number}" for number in range(3)]
    assert shared_lines(prompts) == instruction
    records = [SampleRecord(when="after", prompt=prompt, response="#1", reward=None) for prompt in prompts]
    text = Outline(samples_section(records)).text
    assert text.count("Work out the sum") == 1
    assert text.count("unscored") == 3


def training_sample(step: int, index: int, **changes: Any) -> SampleRecord:
    fields = {"row": 3, "prompt": "Q:1+1", "response": f"<b>{step}/{index}", "reward": float(index), "tokens": 7}
    return SampleRecord(when="training", step=step, index=index, **{**fields, **changes})


def test_samples_of_training_are_a_card_for_each_of_some_steps() -> None:
    samples = [training_sample(step, index) for step in range(1, 101) for index in range(2)]
    page = Outline(training_section(samples))
    cards = [attributes for tag, attributes in page.tags if tag == "details"]
    assert len(cards) == MOST_STEPS
    assert ["open" in card for card in cards] == [True, *[False] * (MOST_STEPS - 2), True]
    for part in ("step 1, prompt 3", "step 100, prompt 3", "<b>1/0", "<b>100/1", "sample 1 1 7 tokens"):
        assert part in page.text
    assert samples_section(samples) == ""
    assert training_section([]) == ""


def test_a_sample_of_training_tells_its_terms_and_its_advantage() -> None:
    terms = {"right": 1.0, "format": None}
    sample = training_sample(1, 0, terms=terms, advantage=-0.5, finish_reason="truncated", reward=None)
    text = Outline(training_section([sample])).text
    assert "sample 0 unscored 7 tokens, truncated, right 1, format unscored, advantage -0.5" in text


def test_an_episode_is_shown_as_a_conversation() -> None:
    said = [("user", "=5"), ("assistant", "<call>add"), ("tool", "8")]
    messages = [{"role": role, "content": content} for role, content in said]
    text = Outline(training_section([training_sample(1, 0, messages=messages)])).text
    for part in ("environment=5", "model<call>add", "environment8"):
        assert part in text
    assert "<b>1/0" not in text


def test_one_prompt_or_a_short_common_beginning_is_shown_whole() -> None:
    assert shared_lines(["a\nb"]) == ""
    assert shared_lines(["Q:\n1", "Q:\n2"]) == ""


# --- comparison --------------------------------------------------------------------------------------------------


def test_a_comparison_shows_results_and_only_those_settings_that_differ(memory: str) -> None:
    first = write_run(join(memory, "one"), "one", seed=1)
    second = write_run(join(memory, "two"), "two", seed=2, sampling={"temperature": 0.7})
    text = compare([first, second])
    for part in ("one", "two", "held-out reward after", "0.900", "0.00041 CHF", "sampling.temperature", "0.7", "▁"):
        assert part in text
    assert re.search(r"│ ?seed +│ 1 +│ 2 ", text)
    assert "rewards" not in text


def test_a_comparison_page_overlays_the_courses(memory: str) -> None:
    folders = [write_run(join(memory, name), "same") for name in ("one", "two")]
    page = Outline(read_bytes(write_comparison(folders, join(memory, "compare.html"))).decode())
    assert "same (1)" in page.text and "same (2)" in page.text
    drawn = [attributes["class"] for tag, attributes in page.tags if tag == "path"]
    assert {"line c1", "line c2"} <= set(drawn)
    assert "Differences" not in page.text
