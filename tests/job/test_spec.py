"""The job document: its defaults, the rules that span fields, and its paths."""

from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless_operator.job.rules import SPEC_RULES
from rlhfless_operator.job.sections import LearningSpec
from rlhfless_operator.job.spec import RLHFJob
from tests.jobs import document, job


def test_a_model_data_a_reward_and_a_length_are_enough() -> None:
    spec = job().spec
    assert spec.algorithm.name == "grpo"
    assert (spec.generation.instances.min, spec.generation.instances.max) == (1, None)
    assert (spec.generation.keep_alive, spec.preparation.keep_alive, spec.learning.keep_alive) == (None, None, None)
    assert (spec.planning.policy, spec.planning.cost_weight) == ("cost", 0.5)
    assert (spec.prices.instance_hour, spec.prices.currency) == (Decimal(0), "USD")
    assert (spec.checkpoints.every_steps, spec.checkpoints.keep, spec.artifacts.uri) == (10, 2, "runs")
    assert (spec.limits.retries, spec.limits.stall) == (3, 120)
    assert spec.evaluation is None


@pytest.mark.parametrize("part", ["model", "rewards", "data"])
def test_what_cannot_be_guessed_is_required(part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        job(**{part: None})


def test_the_weight_of_cost_is_written_lambda() -> None:
    assert job(planning={"lambda": 0.25}).spec.planning.cost_weight == 0.25


def test_a_job_survives_being_written_and_read() -> None:
    whole = job(
        prices={"instanceHour": "2.50"},
        evaluation={"data": {"source": "held-out.jsonl"}, "everySteps": 5},
        checkpoints={"best": True},
        tracking={"wandb": {"project": "p", "mode": "offline"}, "mlflow": {"trackingUri": "./ml", "experiment": "e"}},
        generation={"keepAlive": "1h30m", "flush": "250ms"},
    )
    assert RLHFJob.model_validate_json(whole.model_dump_json(by_alias=True)) == whole


def test_the_learner_is_given_its_settings_without_the_control_planes() -> None:
    own = {"overlap", "keep_alive", "pods", "instances", "gang_timeout"}
    assert set(LearningSpec.model_fields) - set(LearningSpec.__base__.model_fields) == own


@pytest.mark.parametrize("name", ["a", "a-b", "0", "x" * 53])
def test_a_jobs_name_fits_a_dns_label_with_room_for_suffixes(name: str) -> None:
    assert RLHFJob.model_validate({**document(), "metadata": {"name": name}}).metadata.name == name


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a.b", "x" * 54, "a\n"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        RLHFJob.model_validate({**document(), "metadata": {"name": name}})


TWO = [{"name": "a", "math": {}}, {"name": "a", "format": {"pattern": "x"}}]
LONG = [{"name": "short", "length": {"bufferTokens": 64}}]
TOOLS = {"tools": ["tools.py:search"]}
SOLVED = {"name": "solved", "environment": {}}
EVALUATION = {"data": {"source": "held-out.jsonl"}}
GREEDY = {**EVALUATION, "sampling": {"temperature": 0}}


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"epochs": 1}, "steps", "both given"),
        ({"steps": None}, "steps", "set steps or epochs"),
        ({"rewards": TWO}, "rewards", "the name a is given to several"),
        ({"batch": {"samplesPerPrompt": 1}}, "batch.samplesPerPrompt", "grpo compares the samples of a prompt"),
        ({"batch": {"samplesPerPrompt": 1}, "algorithm": {"name": "rloo"}}, "batch.samplesPerPrompt", "leave_one_out"),
        (
            {"batch": {"samplesPerPrompt": 1}, "algorithm": {"name": "ppo", "dynamicSamplingRounds": 1}},
            "batch.samplesPerPrompt",
            "or dynamicSamplingRounds: 0",
        ),
        (
            {"learning": {"processes": 2}, "optimizer": {"name": "muon"}},
            "optimizer.name",
            "muon needs whole matrices, but each of 2 processes holds only parts of them; write adamw, or set",
        ),
        (
            {"learning": {"instances": {"max": 2}}, "optimizer": {"name": "muon"}},
            "optimizer.name",
            "muon needs whole matrices, but each of 2 instances holds only parts of them; write adamw, or set",
        ),
        ({"learning": {"instances": {"min": 2}}}, "learning.instances", "min 2 is more than max 1"),
        ({"preparation": {"instances": {"min": 2, "max": 1}}}, "preparation.instances", "min 2 is more than max 1"),
        ({"async": {"kvCache": "keep"}}, "async.kvCache", "write newWeights: switch, or kvCache: recompute"),
        (
            {
                "async": {"newWeights": "switch", "kvCache": "keep"},
                "generation": {"engine": "vllm"},
                "model": {"source": "m", "lora": {"rank": 4}},
            },
            "async.kvCache",
            "never finds keys and values of the adapter before; write recompute, or generation.engine: transformers",
        ),
        ({"generation": {"instances": {"min": 2, "max": 1}}}, "generation.instances", "min 2 is more than max 1"),
        ({"checkpoints": {"best": True}}, "checkpoints.best", "add spec.evaluation"),
        ({"rewards": LONG, "sampling": {"maxResponseTokens": 64}}, "rewards", "is not less than"),
        ({"evaluation": {**EVALUATION, "rewards": TWO}}, "evaluation.rewards", "the name a is given to several"),
        (
            {"evaluation": {**EVALUATION, "rewards": LONG}, "sampling": {"maxResponseTokens": 64}},
            "evaluation.rewards",
            "is not less than",
        ),
        ({"evaluation": {**GREEDY, "samplesPerPrompt": 2}}, "evaluation.samplesPerPrompt", "would be the same"),
        ({"environment": TOOLS, "sampling": {"stop": ["END"]}}, "environment", "not with sampling.stop"),
        ({"environment": TOOLS, "rewards": [SOLVED]}, "rewards", "tools alone give no score"),
        ({"evaluation": {**EVALUATION, "rewards": [SOLVED]}}, "evaluation.rewards", "the job has no environment"),
    ],
)
def test_rules_that_span_fields_name_the_field_and_the_remedy(spec: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job(**spec)
    (error,) = caught.value.errors()
    (violation,) = error["ctx"]["violations"]
    assert violation.field == field
    assert words in violation.message
    assert all(violation.message.rpartition("; "))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"steps": None, "epochs": 2},
        {"batch": {"samplesPerPrompt": 1}, "algorithm": {"name": "ppo"}},
        {"batch": {"samplesPerPrompt": 1}, "algorithm": {"name": "reinforce_plus_plus"}},
        {"learning": {"overlap": "auto"}, "algorithm": {"name": "dapo"}, "async": {}},
        {"learning": {"processes": 1}, "optimizer": {"name": "muon"}},
        {"batch": {"samplesPerPrompt": 2}, "algorithm": {"name": "ppo", "dynamicSamplingRounds": 1}},
        {"generation": {"instances": {"min": 2, "max": 2}}},
        {"checkpoints": {"best": True}, "evaluation": EVALUATION},
        {"rewards": LONG, "sampling": {"maxResponseTokens": 65}},
        {"evaluation": {**GREEDY, "samplesPerPrompt": 1, "rewards": LONG}},
        {"evaluation": {**EVALUATION, "samplesPerPrompt": 2, "sampling": {"temperature": 0.1}}},
    ],
)
def test_rules_hold_at_their_edges(spec: dict[str, Any]) -> None:
    assert isinstance(job(**spec), RLHFJob)


def test_all_broken_rules_are_found_at_once() -> None:
    large = {"promptsPerStep": 10**5, "samplesPerPrompt": 1}
    broken = {"epochs": 1, "rewards": TWO + LONG, "checkpoints": {"best": True}, "batch": large}
    broken |= {
        "learning": {"processes": 2, "instances": {"min": 2}},
        "optimizer": {"name": "muon"},
        "algorithm": {
            "name": "dapo",
            "importanceSampling": {"mode": "none"},
            "kl": {"coefficient": 0.1, "placement": "reward"},
        },
        "async": {"newWeights": "switch"},
        "preparation": {"instances": {"min": 2, "max": 1}},
    }
    evaluation = {**GREEDY, "samplesPerPrompt": 2, "rewards": [*TWO, *LONG, SOLVED]}
    fields = []
    # That there is no evaluation is a fault of its own.
    # Where an accelerator is unknown its price on spot is, too; and no money is counted without any price.
    broken |= {"prices": {"accelerators": {"A100": "2", "H100": "4"}}}
    spot = {"nodeSelector": {"cloud.google.com/gke-spot": "true"}}
    # Where responses switch to newer weights, keys and values may be kept.
    # Tools can't be used with stop sequences, give no score, and have no pods.
    others = {
        "async": {"kvCache": "keep"},
        "environment": {**TOOLS, "letGo": "never", "pods": {"env": {"A": "1"}}},
        "rewards": [SOLVED],
        "evaluation": evaluation,
        "pods": spot,
        "prices": {"accelerators": {"H100": "4"}, "stages": {"environment": "1"}},
    }
    for spec in (broken, others, {"budget": {"money": "1"}}):
        shared = {"sharePrefixes": "always"} if spec is broken else {}
        stop = ["END"] if spec is others else []
        with pytest.raises(ValidationError) as caught:
            job(
                **spec,
                sampling={"maxResponseTokens": 8, "stop": stop},
                generation={"instances": {"min": 2, "max": 1}, **shared},
            )
        (error,) = caught.value.errors()
        fields += [violation.field for violation in error["ctx"]["violations"]]
    assert fields.count("generation.instances") == 3
    assert Counter([*(rule.field for rule in SPEC_RULES), *["generation.instances"] * 2]) == Counter(fields)


def test_local_paths_become_absolute_from_the_job_files_folder(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    resolved = job(
        model={"source": "policy", "tokenizer": "./tokenizer", "chatTemplate": "chat.jinja"},
        data={"source": "sub/../data.jsonl"},
        rewards=[
            {"name": "code", "python": {"file": "reward.py"}},
            {"name": "preference", "model": {"source": "../reward-model"}},
            {"name": "right", "math": {}},
        ],
        evaluation={
            "data": {"source": "/data/held-out.parquet"},
            "rewards": [{"name": "strict", "python": {"file": "strict.py"}}],
        },
        artifacts={"uri": "runs"},
    ).resolve_paths(tmp_path)
    spec = resolved.spec
    assert spec.model.source == str(tmp_path / "policy")
    assert spec.model.tokenizer == str(tmp_path / "tokenizer")
    assert spec.model.chat_template == str(tmp_path / "chat.jinja")
    assert Path(spec.data.source).resolve() == tmp_path.resolve() / "data.jsonl"
    python, model, right = spec.rewards
    assert python.python is not None
    assert python.python.file == str(tmp_path / "reward.py")
    assert model.model is not None
    assert Path(model.model.source).resolve() == tmp_path.resolve().parent / "reward-model"
    assert right.kind == "math"
    assert spec.evaluation is not None
    assert spec.evaluation.data.source == "/data/held-out.parquet"
    (strict,) = spec.evaluation_rewards
    assert strict.python is not None
    assert strict.python.file == str(tmp_path / "strict.py")
    assert spec.artifacts.uri == "runs"


def test_a_model_is_a_path_only_if_it_looks_like_one_or_exists(tmp_path: Path) -> None:
    hub = job(model={"source": "org/model"})
    assert hub.resolve_paths(tmp_path).spec.model.source == "org/model"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub.resolve_paths(tmp_path).spec.model.source == str(tmp_path / "org" / "model")


@pytest.mark.parametrize("uri", ["s3://bucket/x", "memory://x", "file:///x", "simplecache::s3://bucket/x"])
def test_uris_stay_as_they_are(uri: str, tmp_path: Path) -> None:
    spec = job(model={"source": uri}, data={"source": uri}).resolve_paths(tmp_path).spec
    assert (spec.model.source, spec.data.source) == (uri, uri)


def test_a_template_itself_is_no_path(tmp_path: Path) -> None:
    text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = {"source": "org/model", "chatTemplate": text}
    assert job(model=model).resolve_paths(tmp_path).spec.model.chat_template == text


def test_home_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert job(model={"source": "~/m"}).resolve_paths(Path("/elsewhere")).spec.model.source == str(tmp_path / "m")


def test_paths_resolve_once(tmp_path: Path) -> None:
    once = job(model={"source": "./m"}).resolve_paths(tmp_path)
    assert once.resolve_paths(Path("/elsewhere")) == once
