"""The CRD on a real API server: what it accepts, refuses, fills in and forbids to change.

KUBEBUILDER_ASSETS names a folder with etcd, kube-apiserver and kubectl (the convention of envtest). The tests start and
end a control plane of their own from it, and never touch a cluster that exists.
"""

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.generated.crd import NAME
from rlhfless_operator.job.reading.validation import InvalidJobError, parse_job
from rlhfless_operator.job.resource_status import (
    Condition,
    ResourceStatus,
    changes_of,
    dump_resource_status,
    read_resource_status,
)
from rlhfless_operator.job.spec import API_VERSION, RLHFJob
from rlhfless_operator.records.status import StepStatus
from tests.clusters.control_plane import ApiServer, asset
from tests.controller.operator_harness import job_server
from tests.jobs import document
from tests.prerequisites import needs_api_server

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*/*.yaml"))
JOBS = f"/apis/{API_VERSION}/namespaces/default/rlhfjobs"

pytestmark = needs_api_server("the CRD is not applied to a real API server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """etcd and kube-apiserver with the CRD applied."""
    with job_server(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


def create(server: ApiServer, job: Any, *, dry_run: bool = True) -> tuple[int, Any]:
    """Create a job as strictly as `kubectl apply` does."""
    query = "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
    return server.request("POST", JOBS + query, job)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The smallest job with one value set."""
    job = document()
    place: Any = job
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for parent in parents:
        place = place[parent] if isinstance(parent, int) else place.setdefault(parent, {})
    place[last] = value
    return job


EVALUATION = {"data": {"source": "held-out.jsonl"}}
SPEC = document()["spec"]
KL_IN_THE_REWARD = {"name": "rloo", "kl": {"coefficient": 0.1, "placement": "reward"}}
GOOD = [
    ("spec.seed", 2**53 - 1),
    ("spec.algorithm.name", "ppo"),
    ("spec", {**SPEC, "learning": {"overlap": "auto"}, "algorithm": {"name": "dapo"}}),
    ("spec", {**SPEC, "learning": {"overlap": "auto"}, "async": {}}),
    ("spec", {**SPEC, "learning": {"processes": 1}, "optimizer": {"name": "muon"}}),
    ("spec", {**SPEC, "learning": {"instances": {"min": 2, "max": 4}, "gangTimeout": "1m"}}),
    ("spec", {**SPEC, "batch": {"samplesPerPrompt": 1}, "algorithm": {"name": "ppo"}}),
    ("spec.algorithm", {"name": "ppo", "critic": {"valueClip": None}}),
    ("spec.algorithm", {"name": "ppo", "kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k1"}}),
    ("spec.algorithm", {"name": "grpo", "advantage": "discounted", "advantageNormalization": "batch"}),
    ("spec.algorithm.importanceSampling", {"mode": "mask", "level": "geometric_mean", "low": 0.99, "high": 1.01}),
    ("spec.algorithm.importanceSampling.low", None),
    ("spec.algorithm.importanceSampling.rejection", {"low": 0.99, "high": 1.01}),
    ("spec.algorithm", {"proximalPolicy": "sampler"}),
    ("spec.algorithm", {"proximalPolicy": "sampler", "importanceSampling": {"mode": "none"}}),
    ("spec.algorithm.kl", {"coefficient": 0.1, "placement": "reward"}),
    ("spec.algorithm", {"name": "gmpo"}),
    ("spec.algorithm", {"name": "grpo", "clip": "sapo", "sapoTemperatureNegative": 2}),
    ("spec.algorithm", {"advantageNormalization": "group_per_reward", "kl": {"coefficient": 0.1}}),
    ("spec.algorithm", {"advantageNormalization": "group_per_reward", "whitenOver": "tokens"}),
    ("spec.algorithm", {"name": "ppo", "whitenOver": "tokens"}),
    ("spec.batch", {"promptsPerStep": 4, "samplesPerPrompt": 2, "minibatchSamples": 4}),
    ("spec.batch.minibatchSamples", None),
    ("spec.sampling.stop", ["\n\n"]),
    ("spec.optimizer.learningRate", 1),
    ("spec.generation.instances", {"min": 2, "max": 8}),
    ("spec.generation.instances", {"min": 2}),
    ("spec.generation.keepAlive", "0s"),
    ("spec.generation.flush", "1m30s"),
    ("spec.learning.keepAlive", "1.5h"),
    ("spec.planning.lambda", 1),
    ("spec.prices.instanceHour", "2.50"),
    ("spec.prices", {"stages": {"learning": "4"}, "accelerators": {"H100": "4.00"}, "spot": {"H100": "1.60"}}),
    ("spec.budget", {"gpuHours": 0.5}),
    ("spec.budget", None),
    ("spec", {**SPEC, "prices": {"instanceHour": "1"}, "budget": {"money": "0.01", "gpuHours": 100}}),
    ("spec", {**SPEC, "prices": {"stages": {"learning": "1"}}, "budget": {"money": "1"}}),
    ("spec", {**SPEC, "prices": {"accelerators": {"H100": "1"}}, "budget": {"money": "1"}}),
    ("spec.async", {}),
    ("spec.async", {"maxStaleness": 8, "newWeights": "finish"}),
    ("spec.async", {"newWeights": "switch"}),
    ("spec.async", {"newWeights": "switch", "kvCache": "keep"}),
    ("spec.async", {"newWeights": "finish", "kvCache": "recompute"}),
    ("spec", {**SPEC, "async": {"newWeights": "finish"}, "algorithm": KL_IN_THE_REWARD}),
    ("spec", {**SPEC, "async": {}, "algorithm": {"name": "grpo", "proximalPolicy": "sampler"}}),
    ("spec.evaluation", EVALUATION),
    ("spec.evaluation", None),
    ("spec.evaluation", {**EVALUATION, "sampling": {"temperature": 0}}),
    ("spec.evaluation", {**EVALUATION, "sampling": {"temperature": 0.5}, "samplesPerPrompt": 4}),
    ("spec.evaluation", {**EVALUATION, "rewards": [{"name": "a", "math": {}}, {"name": "b", "math": {}}]}),
    ("spec.tracking", {"wandb": {"project": "p", "mode": "offline"}, "mlflow": None}),
    ("spec.rewards.0.memory", "512Mi"),
    ("spec.rewards", [{"name": "a", "math": {}}, {"name": "b", "length": {"bufferTokens": 10}, "weight": -1}]),
    ("metadata.labels", {"team": "a"}),
    ("spec.suspend", True),
    ("spec.backoffLimit", 0),
    ("spec.activeDeadline", "36h"),
    ("spec.ttlAfterFinished", "0s"),
]
BAD = [
    ("metadata.name", "Job"),
    ("metadata.name", "x" * 54),
    ("spec.model", {}),
    ("spec.model.source", ""),
    ("spec.model.dtype", "float16"),
    ("spec.wrong", 1),
    ("spec.batch.samples_per_prompt", 4),
    ("spec.steps", 0),
    ("spec.steps", None),
    ("spec.steps", "10"),
    ("spec.steps", 1.5),
    ("spec.epochs", 1),
    ("spec.seed", -1),
    ("spec.seed", 2**53),
    ("spec.rewards", []),
    ("spec.rewards", [{"name": "a"}]),
    ("spec.rewards", [{"name": "a", "math": {}, "format": {"pattern": "x"}}]),
    ("spec.rewards", [{"name": "a", "math": {}}, {"name": "a", "math": {}}]),
    ("spec.rewards", [{"name": "a", "length": {"bufferTokens": 1024}}]),
    ("spec.rewards", [{"name": f"r{number}", "math": {}} for number in range(33)]),
    ("spec.rewards.0.timeout", "0s"),
    ("spec.rewards.0.timeout", 10),
    ("spec.rewards.0.timeout", "10"),
    ("spec.rewards.0.memory", "1Zi"),
    ("spec.rewards.0.name", "_"),
    ("spec.algorithm.name", "a2c"),
    ("spec.algorithm.importanceSampling", {"low": 2, "high": 2}),
    ("spec.algorithm.importanceSampling.cap", 2),
    ("spec.algorithm.importanceSampling.rejection", {"low": 0.99}),
    ("spec.algorithm.importanceSampling.rejection", {"low": 2, "high": 1.01}),
    ("spec.algorithm", {"proximalPolicy": "sampler", "importanceSampling": {"high": 3}}),
    ("spec.algorithm", {"proximalPolicy": "sampler", "importanceSampling": {"rejection": {"high": 1.01}}}),
    ("spec.algorithm.kl", {"coefficient": 0.1, "placement": "reward", "estimator": "k2"}),
    ("spec.algorithm.kl", {"coefficient": 0.1, "placement": "reward", "estimator": "k3"}),
    ("spec.algorithm.kl", {"coefficient": 0.1, "estimator": "k1"}),
    ("spec.algorithm", {"name": "cispo", "dualClip": 3}),
    ("spec.algorithm", {"name": "sapo", "clipLow": 0.2}),
    ("spec.algorithm", {"name": "gmpo", "ratioLevel": "token"}),
    ("spec.algorithm", {"name": "ppo", "clip": "gmpo", "ratioLevel": "sequence"}),
    ("spec.algorithm.critic", {}),
    ("spec.algorithm", {"name": "ppo", "advantageNormalization": "group"}),
    ("spec.algorithm", {"name": "ppo", "advantageNormalization": "group_per_reward"}),
    ("spec.algorithm", {"whitenOver": "tokens"}),
    ("spec.algorithm", {"name": "ppo", "whitenOver": "samples"}),
    (
        "spec.algorithm",
        {
            "advantageNormalization": "group_per_reward",
            "kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k1"},
        },
    ),
    ("spec.async", {"maxStaleness": 0}),
    ("spec.async", {"newWeights": "keep"}),
    ("spec.async", {"kvCache": "keep"}),
    (
        "spec",
        {
            **SPEC,
            "async": {"newWeights": "switch", "kvCache": "keep"},
            "generation": {"engine": "vllm"},
            "model": {**SPEC["model"], "lora": {"rank": 4}},
        },
    ),
    ("spec", {**SPEC, "async": {"newWeights": "switch"}, "algorithm": KL_IN_THE_REWARD}),
    ("spec", {**SPEC, "async": {}, "generation": {"sharePrefixes": "always"}}),
    ("spec", {**SPEC, "async": {}, "algorithm": {"name": "grpo", "importanceSampling": {"mode": "none"}}}),
    ("spec.limits.unscorable", 1.5),
    ("spec.algorithm.advantage", "gae"),
    ("spec.algorithm.kl", {"coefficient": 0.1, "estimator": "k1"}),
    ("spec.algorithm.dualClip", 1.0),
    ("spec.batch.samplesPerPrompt", 1),
    ("spec", {**SPEC, "batch": {"samplesPerPrompt": 1}, "algorithm": {"name": "ppo", "dynamicSamplingRounds": 1}}),
    ("spec", {**SPEC, "learning": {"processes": 2}, "optimizer": {"name": "muon"}}),
    ("spec", {**SPEC, "learning": {"instances": {"max": 2}}, "optimizer": {"name": "muon"}}),
    ("spec", {**SPEC, "learning": {"instances": {"min": 3, "max": 2}}}),
    ("spec", {**SPEC, "preparation": {"instances": {"min": 3, "max": 2}}}),
    ("spec.batch.samplesPerPrompt", 2**40),
    ("spec.batch", {"promptsPerStep": 2**53, "samplesPerPrompt": 2**53}),
    ("spec.evaluation", {**EVALUATION, "samplesPerPrompt": 1025}),
    ("spec.evaluation", {**EVALUATION, "sampling": {"temperature": 0}, "samplesPerPrompt": 2}),
    ("spec.evaluation", {**EVALUATION, "sampling": {"temperature": -1}}),
    ("spec.evaluation", {**EVALUATION, "rewards": []}),
    ("spec.evaluation", {**EVALUATION, "rewards": [{"name": "a", "math": {}}, {"name": "a", "math": {}}]}),
    ("spec.evaluation", {**EVALUATION, "rewards": [{"name": "a", "length": {"bufferTokens": 1024}}]}),
    ("spec.sampling.temperature", 0),
    ("spec.batch.minibatchSamples", 7),
    ("spec.generation.instances", {"min": 2, "max": 1}),
    ("spec.generation.flush", "0s"),
    ("spec.planning.lambda", 1.5),
    ("spec.prices.instanceHour", 2.5),
    ("spec.prices.instanceHour", "-1"),
    ("spec.prices.currency", "euro"),
    ("spec.prices.stages.rollout", "1"),
    ("spec.prices.accelerators.H100", 4),
    ("spec.prices.spot.H100", "cheap"),
    ("spec.budget", {}),
    ("spec.budget.gpuHours", 0),
    ("spec.budget.money", "1"),
    ("spec", {**SPEC, "prices": {"instanceHour": "1"}, "budget": {"money": "0.00"}}),
    ("spec", {**SPEC, "prices": {"instanceHour": "1"}, "budget": {"money": 5}}),
    ("spec", {**SPEC, "prices": {"instanceHour": "1"}, "budget": {"money": "-1"}}),
    ("spec.checkpoints.best", True),
    ("spec.checkpoints.keep", 0),
    ("spec.tracking.wandb", {"mode": "online"}),
    ("spec.evaluation", {}),
    ("spec.suspend", "yes"),
    ("spec.backoffLimit", -1),
    ("spec.activeDeadline", "0s"),
    ("spec.activeDeadline", 3600),
    ("spec.ttlAfterFinished", "-1s"),
]


def name_of(case: Any) -> str:
    return case if isinstance(case, str) else json.dumps(case)[:40]


@pytest.mark.parametrize(("path", "value"), GOOD, ids=name_of)
def test_the_server_and_the_command_line_accept_the_same_jobs(server: ApiServer, path: str, value: Any) -> None:
    job = changed(path, value)
    parse_job(json.dumps(job))
    status, answer = create(server, job)
    assert status == 201, answer["message"]


@pytest.mark.parametrize(("path", "value"), BAD, ids=name_of)
def test_the_server_and_the_command_line_refuse_the_same_jobs(server: ApiServer, path: str, value: Any) -> None:
    job = changed(path, value)
    with pytest.raises(InvalidJobError):
        parse_job(json.dumps(job))
    status, answer = create(server, job)
    assert status in (400, 422), answer


def test_the_server_fills_in_the_defaults_of_the_model(server: ApiServer) -> None:
    _, stored = create(server, document())
    filled = RLHFJob.model_validate({**document(), "spec": stored["spec"]}, by_name=False)
    assert filled == RLHFJob.model_validate(document())


def test_an_explicit_null_that_means_something_is_kept(server: ApiServer) -> None:
    _, stored = create(server, changed("spec.algorithm", {"name": "ppo", "critic": {"valueClip": None}}))
    assert stored["spec"]["algorithm"]["critic"]["valueClip"] is None


def test_the_examples_can_be_applied(server: ApiServer) -> None:
    assert EXAMPLES
    files = [part for example in EXAMPLES for part in ("-f", str(example))]
    command = [asset("kubectl"), "--kubeconfig", server.kubeconfig, "apply", "--dry-run=server", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("created (server dry run)") == len(EXAMPLES)


@pytest.fixture
def stored(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A job on the server."""
    status, job = create(server, document(), dry_run=False)
    assert status == 201, job
    yield job
    server.request("DELETE", f"{JOBS}/job")


def test_the_model_cannot_be_changed(server: ApiServer, stored: dict[str, Any]) -> None:
    status, answer = replace(server, stored, "model", {"source": "./other"})
    assert status == 422
    assert "model can't be changed" in answer["message"]


def test_steps_may_only_grow(server: ApiServer, stored: dict[str, Any]) -> None:
    status, answer = replace(server, stored, "steps", 9)
    assert status == 422
    assert "steps may only grow" in answer["message"]
    assert replace(server, stored, "steps", 11)[0] == 200


def test_steps_cannot_become_epochs(server: ApiServer, stored: dict[str, Any]) -> None:
    job = copy.deepcopy(stored)
    del job["spec"]["steps"]
    assert replace(server, job, "epochs", 100)[0] == 422


def test_what_is_learnt_from_is_fixed_once_a_step_is_done(server: ApiServer, stored: dict[str, Any]) -> None:
    assert replace(server, stored, "sampling", {"temperature": 0.5})[0] == 200
    done = {"status": dump_resource_status(ResourceStatus(step=1))}
    code, stored = server.request("PATCH", f"{JOBS}/job/status", done, "application/merge-patch+json")
    assert code == 200, stored
    for field, value in (
        ("sampling", {"temperature": 0.5}),
        ("seed", 1),
        ("data", {"source": "other.jsonl"}),
        ("batch", {"promptsPerStep": 8}),
        ("algorithm", {"name": "rloo"}),
        ("async", {}),
    ):
        status, answer = replace(server, stored, field, value)
        assert status == 422
        assert f"spec.{field} can't be changed once a step is done" in answer["message"]
    status, answer = replace(server, stored, "optimizer", {"name": "muon"})
    assert status == 422
    assert "spec.optimizer.name can't be changed once a step is done" in answer["message"]
    assert replace(server, stored, "optimizer", {"learningRate": 0.5})[0] == 200, "from the next step on"
    assert replace(server, stored, "suspend", True)[0] == 200


def replace(server: ApiServer, job: dict[str, Any], field: str, value: Any) -> tuple[int, Any]:
    job = copy.deepcopy(job)
    job["spec"][field] = value
    return server.request("PUT", f"{JOBS}/job?dryRun=All", job)


def test_a_status_is_stored_and_shown(server: ApiServer, stored: dict[str, Any]) -> None:
    status = ResourceStatus(
        phase="Running", stage="learning", stages="learning", step=41, steps=200, reward=0.51234567, actors=3,
        cost="1.25", message="x", forecast="6.10", budget="42%", budget_used=0.4166,
        recent_steps=[StepStatus(step=41, seconds=2.5, actors=3, cost="0.03")], progress="41/200", reason="Training",
        conditions=[Condition(type="Progressing", status="True", reason="Training")],
    )  # fmt: skip
    body = {"status": dump_resource_status(status)}
    code, answer = server.request("PATCH", f"{JOBS}/job/status", body, "application/merge-patch+json")
    assert code == 200, answer
    assert read_resource_status(answer["status"]) == status.model_copy(update={"reward": 0.5123})
    assert changes_of(answer["status"], dump_resource_status(status)) == {}

    command = [asset("kubectl"), "--kubeconfig", server.kubeconfig, "get", "rlhf", "-o", "wide"]
    head, row = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    columns = ["NAME", "PHASE", "STAGE", "STEP", "ACTORS", "REWARD", "COST", "AGE"]
    columns += ["FORECAST", "BUDGET", "IDLE", "REASON"]
    assert head.split() == columns
    assert row.split()[:7] == ["job", "Running", "learning", "41/200", "3", "0.5123", "1.25"]
    assert row.split()[8:10] == ["6.10", "42%"]
    assert row.split()[-1] == "Training"


def test_the_definition_is_established_with_its_schema(server: ApiServer) -> None:
    _, answer = server.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}")
    conditions = {condition["type"]: condition["status"] for condition in answer["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert "NonStructuralSchema" not in conditions
