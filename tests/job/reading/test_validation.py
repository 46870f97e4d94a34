"""Every fault of a job document at once: field, line, value and remedy."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.job.reading.validation import InvalidJobError, load_job, parse_job
from rlhfless_operator.job.spec import RLHFJob
from tests.job.good_document import GOOD, faults, only


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_good_document_is_a_job() -> None:
    job = parse_job(GOOD)
    assert job.spec.optimizer.learning_rate == 1e-6
    assert job.spec.limits.stall == 90
    assert job.spec.algorithm.critic is not None
    assert job.spec.algorithm.critic.value_clip is None


@pytest.mark.parametrize(
    ("good", "bad", "path", "message"),
    [
        # Names
        ("samplesPerPrompt", "samplePerPrompt", "spec.batch.samplePerPrompt", "did you mean samplesPerPrompt?"),
        ("samplesPerPrompt", "samples_per_prompt", "spec.batch.samples_per_prompt", "did you mean samplesPerPrompt?"),
        ("steps: 10", "epoch: 10", "spec.epoch", "did you mean epochs?"),
        ("limits:", "samplesPerPrompt: 4\n  limits:", "spec.samplesPerPrompt", "it belongs to spec.batch"),
        ("limits:", "wibble: 4\n  limits:", "spec.wibble", "known here: model, algorithm, rewards"),
        ("math: {}", "math: {tolerance: 1}", "spec.rewards[0].math.tolerance", "known here: requireEnd, timeout"),
        ("limits:", "top_p: 0.9\n  limits:", "spec.top_p", "remove it: rlhfless samples from the full"),
        ("kind: RLHFJob", "kind: RLHFJob\nstatus: {}", "status", "known here: apiVersion"),
        # What must be there
        ("    source: org/model\n", "", "spec.model.source", "missing; add it: A Hugging Face folder"),
        ("    - name: right\n      math: {}", "    - math: {}", "spec.rewards[0].name", "missing; add it"),
        ("project: p, ", "", "spec.tracking.wandb.project", "missing"),
        ("kind: RLHFJob\n", "", "kind", "missing; write kind: RLHFJob"),
        ("apiVersion: rlhfless.io/v1alpha1\n", "", "apiVersion", "write apiVersion: rlhfless.io/v1alpha1"),
        ("  steps: 10\n", "", "spec.steps", "set steps or epochs"),
        # Types
        (
            "promptsPerStep: 8",
            'promptsPerStep: "8"',
            "spec.batch.promptsPerStep",
            '"8" is text, not a whole number; remo',
        ),
        ("promptsPerStep: 8", "promptsPerStep: 8.0", "spec.batch.promptsPerStep", "write 8"),
        ("promptsPerStep: 8", "promptsPerStep: many", "spec.batch.promptsPerStep", "write a whole number"),
        (
            "promptsPerStep: 8",
            "promptsPerStep:",
            "spec.batch.promptsPerStep",
            "empty, but a whole number is expected",
        ),
        ("promptsPerStep: 8", "promptsPerStep: 9999999999999999999", "spec.batch.promptsPerStep", "smaller number"),
        ("learningRate: 1e-6", "learningRate: .nan", "spec.optimizer.learningRate", "not finite"),
        ("learningRate: 1e-6", "learningRate: [1]", "spec.optimizer.learningRate", "a list of 1 is of another kind"),
        ("best: true", 'best: "true"', "spec.checkpoints.best", "remove the quotes"),
        ("best: true", "best: 1", "spec.checkpoints.best", "write true or false"),
        ("source: org/model", "source: 5", "spec.model.source", 'put it in quotes: "5"'),
        ("source: org/model", "source: true", "spec.model.source", 'put it in quotes: "true"'),
        ("name: job", "name: 7", "metadata.name", 'put it in quotes: "7"'),
        ("team: a", "team: 1", "metadata.labels.team", 'put it in quotes: "1"'),
        ("[q_proj]", "q_proj", "spec.model.lora.targetModules", "one item per line"),
        ("[q_proj]", "[1]", "spec.model.lora.targetModules[0]", "in quotes"),
        ('{maxResponseTokens: 64, stop: ["\\n\\n"]}', "64", "spec.sampling", "write fields below it: temperature"),
        # Units
        ("stall: 1m30s", "stall: 90", "spec.limits.stall", "90 has no unit; write a number with its unit"),
        ("stall: 1m30s", "stall: 90 seconds", "spec.limits.stall", "'90 seconds' is not a duration; write"),
        ("stall: 1m30s", "stall: 0s", "spec.limits.stall", "longer than 0s; write"),
        ("stall: 1m30s", "stall: true", "spec.limits.stall", "true is not a duration; write"),
        ("memory: 512Mi", "memory: 1073741824", "spec.rewards[1].memory", "has no unit"),
        ("memory: 512Mi", "memory: 16GB", "spec.rewards[1].memory", "such as 512Mi or 16Gi"),
        ('"2.50"', "2.50", "spec.prices.instanceHour", "in quotes"),
        ('"2.50"', '"$2"', "spec.prices.instanceHour", "'$2' is not a price"),
        # Bounds, choices and forms
        ("lambda: 0.25", "lambda: 1.5", "spec.planning.lambda", "1.5 is out of bounds; write at most 1"),
        ("clipLow: 0.1", "clipLow: -0.1", "spec.algorithm.clipLow", "write at least 0"),
        ("steps: 10", "steps: 0", "spec.steps", "write at least 1"),
        ("[q_proj]", "[]", "spec.model.lora.targetModules", "an empty list is out of bounds; write at least 1"),
        ("name: ppo", "name: PPO", "spec.algorithm.name", "did you mean ppo?"),
        ("name: ppo", "name: a2c", "spec.algorithm.name", "dapo, gspo, cispo, gmpo or sapo"),
        ("schedule: cosine", "schedule: 5", "spec.optimizer.schedule", "write constant, linear or cosine"),
        ("v1alpha1", "v1", "apiVersion", "write rlhfless.io/v1alpha1"),
        ("kind: RLHFJob", "kind: Deployment", "kind", "this is not a job; write kind: RLHFJob"),
        ("name: job", "name: My_Job", "metadata.name", "lower-case letters, digits and hyphens"),
        ("EUR", "euro", "spec.prices.currency", "three capital letters"),
        # Rules that span fields
        ("minibatchSamples: 16", "minibatchSamples: 7", "spec.batch.minibatchSamples", "does not divide"),
        ("placement: reward", "placement: loss", "spec.algorithm.kl.estimator", "use k2 or k3"),
        ("estimator: k1", "estimator: k3", "spec.algorithm.kl.estimator", "use k1, or placement: loss"),
        ("high: 2", "cap: 2", "spec.algorithm.importanceSampling.cap", "it is spec.algorithm.importanceSampling.high"),
        ("high: 2", "level: sequence", "spec.algorithm.importanceSampling.level", "did you mean sequence_product?"),
        ("name: ppo", "name: reinforce_plus_plus", "spec.algorithm.critic", "has no critic; remove it"),
        ("math: {}", "math: {}\n      format: {pattern: x}", "spec.rewards[0]", "it has math and format"),
        ("name: short", "name: right", "spec.rewards", "the name right is given to several"),
        ("min: 1, max: 4", "min: 5, max: 4", "spec.generation.instances", "raise max or lower min"),
        ("bufferTokens: 16", "bufferTokens: 64", "spec.rewards", "is not less than"),
        ("  evaluation:\n    data: {source: held-out.jsonl}\n", "", "spec.checkpoints.best", "add spec.evaluation"),
        ("steps: 10", "steps: 10\n  epochs: 1", "spec.steps", "remove one"),
        # The text itself
        ("best: true", "best: yes", "spec.checkpoints.best", "write true or false"),
        ("steps: 10", "steps: 10\n  steps: 20", "spec.steps", "given a second time"),
        ("steps: 10", "steps: [10", "", "not YAML"),
    ],
)
def test_each_fault_names_the_field_and_the_remedy(good: str, bad: str, path: str, message: str) -> None:
    assert GOOD.count(good) >= 1
    fault = only(GOOD.replace(good, bad, 1))
    assert fault.path == path
    assert message in str(fault)
    assert fault.message
    assert fault.remedy


@pytest.mark.parametrize(
    ("good", "bad", "where"),
    [
        ("samplesPerPrompt: 4", "samplePerPrompt: 4", "samplePerPrompt"),
        ("timeout: 30s", "timeout: 30", "timeout"),
        ("{rank: 8, targetModules: [q_proj]}", "\n      targetModules:\n        - a\n        - 5", "- 5"),
        ("best: true", "best: 3", "best"),
        ("    source: org/model\n", "", "model:"),
        ("placement: reward", "placement: loss", "kl:"),
        ("math: {}", "code: {}\n      format: {pattern: x}", "- name: right"),
        ("min: 1, max: 4", "min: 5, max: 4", "instances"),
    ],
)
def test_each_fault_names_the_line(good: str, bad: str, where: str) -> None:
    text = GOOD.replace(good, bad, 1)
    assert only(text).line == line_of(text, where)


def test_a_fault_keeps_the_value() -> None:
    assert only(GOOD.replace("steps: 10", "steps: 0")).value == 0
    assert only(GOOD.replace("steps: 10", "steps: ten")).value == "ten"


def test_a_message_begins_with_the_file_and_the_line() -> None:
    text = GOOD.replace("samplesPerPrompt", "samplePerPrompt")
    with pytest.raises(InvalidJobError) as caught:
        parse_job(text, "my.yaml")
    expected = "my.yaml:27: spec.batch.samplePerPrompt: unknown field; did you mean samplesPerPrompt?"
    assert str(caught.value) == expected


def test_all_faults_are_found_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Of the text's fields, of rules over several fields, and of files: one run of `validate` shows them all."""
    text = (
        GOOD.replace("name: job", "name: Job")
        .replace("rank: 8", "rnk: 8")
        .replace("estimator: k1", "estimator: k1, placment: loss")
        .replace("timeout: 30s", "timeout: 30")
        .replace("weight: -0.5", 'weight: "-0.5"')
        .replace("minibatchSamples: 16", "minibatchSamples: 7")
        .replace("min: 1", "min: 9")
        .replace("best: true", "keep: 0")
    )
    found = [fault.path for fault in faults(text, base=tmp_path)]
    assert found == [
        "metadata.name",
        "spec.model.lora.rnk",
        "spec.algorithm.kl.placment",
        "spec.rewards[0].timeout",
        "spec.rewards[1].weight",
        "spec.data.source",
        "spec.batch.minibatchSamples",
        "spec.generation.instances",
        "spec.evaluation.data.source",
        "spec.checkpoints.keep",
    ]


def test_a_name_that_is_a_truth_value_hides_no_other_fault() -> None:
    """verl's `n:` is true or false to readers of YAML 1.1."""
    text = GOOD.replace("samplesPerPrompt: 4", "n: 4").replace("rank: 8", "rnk: 8").replace("best: true", "best: yes")
    found = [str(fault) for fault in faults(text)]
    assert found == [
        "spec.model.lora.rnk: unknown field; did you mean rank?",
        "spec.batch.n: unknown field; it is spec.batch.samplesPerPrompt here",
        "spec.checkpoints.best: some YAML readers take yes as a truth value, others as text;"
        ' write true or false, or "yes" in quotes for text',
    ]


def test_a_name_of_the_users_own_that_is_a_truth_value_is_a_fault() -> None:
    fault = only(GOOD.replace("labels: {team: a}", "labels: {n: a}"))
    assert fault.path == "metadata.labels.n"
    assert "as a truth value, others as text" in fault.message


def test_a_repeated_field_hides_no_other_fault() -> None:
    text = GOOD.replace("steps: 10", "steps: 10\n  steps: 20").replace("stall: 1m30s", "stall: 90")
    assert [fault.path for fault in faults(text)] == ["spec.steps", "spec.limits.stall"]


def test_what_follows_from_another_fault_is_not_reported() -> None:
    # Whether the minibatch divides the step, or one length is given, can't be said of fields that are wrong.
    assert only(GOOD.replace("promptsPerStep: 8", "promptsPerStep: 7.5")).path == "spec.batch.promptsPerStep"
    assert only(GOOD.replace("steps: 10", 'steps: "10"')).path == "spec.steps"
    assert only(GOOD.replace("math: {}", "math: 5")).path == "spec.rewards[0].math"
    assert only(GOOD.replace("source: held-out.jsonl", "sauce: x")).path == "spec.evaluation.data.sauce"


def test_a_document_of_another_kind_is_not_taken_apart() -> None:
    assert only("apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: 1}\n").line == 2


@pytest.mark.parametrize("spec", ["", "spec:", "spec: 5", "spec: []", "spec: {}"])
def test_a_document_without_a_spec_says_so(spec: str) -> None:
    text = f"apiVersion: rlhfless.io/v1alpha1\nkind: RLHFJob\nmetadata: {{name: a}}\n{spec}\n"
    assert all(fault.path.startswith("spec") for fault in faults(text))


def test_missing_files_are_faults_with_field_and_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    with pytest.raises(InvalidJobError) as caught:
        load_job(path)
    assert [fault.path for fault in caught.value.faults] == ["spec.data.source", "spec.evaluation.data.source"]
    assert str(caught.value).startswith(
        f"{path}:{line_of(GOOD, 'data: {')}: spec.data.source: {tmp_path}/data.jsonl does"
    )
    assert load_job(path, files=False) == parse_job(GOOD)
    for name in ("data.jsonl", "held-out.jsonl"):
        (tmp_path / name).write_text('{"question": "1+1=", "answer": 2, "prompt": "1+1="}\n')
    assert load_job(path) == parse_job(GOOD)


def test_the_files_of_the_evaluations_own_rewards_are_looked_at(tmp_path: Path) -> None:
    text = GOOD.replace(
        "    data: {source: held-out.jsonl}",
        "    data: {source: held-out.jsonl}\n    rewards: [{name: strict, python: {file: strict.py}}]",
    )
    assert [fault.path for fault in faults(text, base=tmp_path)][-1] == "spec.evaluation.rewards[0].python.file"


def test_a_file_that_cannot_be_read_is_one_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match="cannot be read: No such file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(InvalidJobError, match="cannot be read: Is a directory"):
        load_job(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(InvalidJobError, match=r"latin.yaml:2: the byte 0xe9 is not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_job(tmp_path / "job.yaml", files=False) == parse_job(GOOD)


@pytest.mark.parametrize("example", sorted((Path(__file__).parents[3] / "examples").glob("*/*.yaml")), ids=str)
def test_the_examples_are_jobs(example: Path) -> None:
    load_job(example, files=False)


def accepted_or_explained(text: str) -> None:
    try:
        assert isinstance(parse_job(text), RLHFJob)
    except InvalidJobError as error:
        assert error.faults
        assert all(fault.line >= 1 and fault.message and fault.remedy for fault in error.faults)


SCRAPS: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    float("inf"),
    "",
    "x",
    "5",
    "1s",
    "-1s",
    "k1",
    [],
    {},
    [[]],
    {"": 0},
]


def places_in(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else []
    return [path, *(place for name, part in inner for place in places_in(part, (*path, name)))]


PLACES = places_in(yaml.safe_load(GOOD))[1:]


@given(
    st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from([*SCRAPS, "delete", "rename"])), min_size=1, max_size=6)
)
def test_any_change_of_a_good_document_is_accepted_or_explained(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = yaml.safe_load(GOOD)
    for (*parents, name), scrap in changes:
        place: Any = document
        for parent in parents:
            place = place[parent] if place_has(place, parent) else None
        if not place_has(place, name):
            continue
        if scrap == "delete":
            del place[name]
        elif scrap == "rename" and isinstance(place, dict):
            place[f"{name}s"] = place.pop(name)
        else:
            place[name] = copy.deepcopy(scrap)
    accepted_or_explained(json.dumps(document))


def place_has(place: Any, name: Any) -> bool:
    if isinstance(place, list):
        return isinstance(name, int) and name < len(place)
    return isinstance(place, dict) and name in place


DEBRIS = ["", " ", "\n", "\t", ":", "- ", "{", "]", '"', "&a ", "*a", "!", "é", "\0", "<<: "]


@given(st.integers(0, 2**32))
def test_any_damage_to_the_text_is_accepted_or_explained(seed: int) -> None:
    rng = random.Random(seed)
    text = GOOD
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text))
        end = min(len(text), start + rng.choice([0, 1, 3, 20]))
        text = text[:start] + rng.choice(DEBRIS) + text[end:]
    accepted_or_explained(text)
