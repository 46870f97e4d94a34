"""What a job can have of a machine's GPUs."""

from typing import Any

import pytest

from rlhfless_functions.api import Stage
from rlhfless_operator.job.actor_range import ActorRange, preparer_range
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.gpu_assignment import GpuAssignment, TooFewGpusError, assign_gpus
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.requests.builder import RequestBuilder
from tests import jobs


def job(**spec: Any) -> RLHFJob:
    """A job without a model of its own for preparation."""
    return jobs.job(
        **{
            "rewards": [{"name": "short", "length": {"bufferTokens": 3}}],
            "algorithm": {"name": "grpo", "kl": {"coefficient": 0}},
            **spec,
        }
    )


def assignment(made: RLHFJob, *gpus: str) -> GpuAssignment:
    return assign_gpus(made, RequestBuilder(made, JobFolder("folder"), "uid"), gpus)


def test_on_a_machine_without_gpus_nothing_changes() -> None:
    made = job(generation={"instances": {"max": 4}, "vllm": {"tensorParallelSize": 2}})
    assert assignment(made) == GpuAssignment(ActorRange(1, 4), ActorRange(1, 1))


def test_on_a_machine_without_gpus_one_actor_has_all_cores_unless_the_job_says_otherwise() -> None:
    assert assignment(job()).actors == ActorRange(1, 1)
    assert assignment(job(generation={"instances": {"min": 2}})).actors == ActorRange(2, 2)


@pytest.mark.parametrize(("gpus_each", "actors"), [(1, 5), (2, 2), (5, 1)])
def test_a_job_that_names_no_number_has_as_many_actors_as_there_are_gpus_for(gpus_each: int, actors: int) -> None:
    made = job(generation={"vllm": {"tensorParallelSize": gpus_each}})
    found = assignment(made, *map(str, range(5)))
    assert found.actors == ActorRange(1, actors)
    assert (found.shared is not None) == (actors * gpus_each == 5), "the learner has the GPU that is left, where one is"


def test_a_number_that_the_job_names_means_what_it_says() -> None:
    made = job(generation={"instances": {"max": 2}})
    found = assignment(made, *map(str, range(8)))
    assert (found.actors, found.shared) == (ActorRange(1, 2), None)


def test_an_instance_has_as_many_gpus_as_it_says() -> None:
    made = job(generation={"vllm": {"tensorParallelSize": 2}}, learning={"processes": 4})
    assert assignment(made, "0", "1", "2", "3").per_instance == {"generation": 2, "preparation": 0, "learning": 4}


def test_transformers_generates_on_one_gpu() -> None:
    made = job(generation={"engine": "transformers", "vllm": {"tensorParallelSize": 2}})
    assert assignment(made, "0").per_instance == {"generation": 1, "preparation": 0, "learning": 1}


@pytest.mark.parametrize(
    "spec",
    [
        {"algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}}},
        {"algorithm": {"name": "ppo", "kl": {"coefficient": 0}}},
        {"rewards": [{"name": "judge", "model": {"source": "/reward"}}]},
        {"preparation": {"pods": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}},
    ],
)
def test_preparation_has_a_gpu_where_a_model_computes_in_it(spec: dict[str, Any]) -> None:
    assert assignment(job(**spec), "0").per_instance == {"generation": 1, "preparation": 1, "learning": 1}


@pytest.mark.parametrize(("warmup", "preparing"), [(0, 0), (1, 1)])
def test_preparation_of_an_asynchronous_job_asks_no_critic(warmup: int, preparing: int) -> None:
    """While the policy is frozen, preparation computes its log-probabilities."""
    algorithm = {"name": "ppo", "kl": {"coefficient": 0}, "critic": {"warmupSteps": warmup}}
    found = assignment(job(algorithm=algorithm, **{"async": {}}), "0", "1", "2")
    assert found.per_instance == {"generation": 1, "preparation": preparing, "learning": 1}


def test_preparation_needs_no_gpu_for_several_updates() -> None:
    """The learner asks its own policy what it said before the first."""
    made = job(algorithm={"name": "grpo", "kl": {"coefficient": 0}, "epochs": 2})
    assert assignment(made, "0").per_instance == {"generation": 1, "preparation": 0, "learning": 1}


def test_preparation_needs_no_gpu_for_memory_of_the_host() -> None:
    limits = {"memory": "8Gi", "nvidia.com/gpu": 0}
    made = job(preparation={"pods": {"resources": {"limits": limits}}})
    assert assignment(made, "0").per_instance == {"generation": 1, "preparation": 0, "learning": 1}


PREPARES: dict[str, Any] = {"algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}}}


@pytest.mark.parametrize(("count", "turns"), [(1, True), (2, True), (3, True), (4, False), (8, False)])
def test_stages_take_turns_where_they_do_not_all_fit(count: int, turns: bool) -> None:
    made = job(algorithm={"name": "grpo", "kl": {"coefficient": 0.01}}, generation={"instances": {"max": 2}})
    assert (assignment(made, *map(str, range(count))).shared is not None) == turns


def test_there_are_no_more_actors_than_have_gpus() -> None:
    made = job(generation={"instances": {"min": 3, "max": 8}, "vllm": {"tensorParallelSize": 2}})
    assert assignment(made, "0", "1", "2", "3").actors == ActorRange(2, 2)
    assert assignment(made, *map(str, range(16))).actors == ActorRange(3, 8)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"generation": {"vllm": {"tensorParallelSize": 4}}}, "generation.vllm.tensorParallelSize is 4"),
        ({"learning": {"processes": 8}}, "learning.processes is 8"),
        (
            {"learning": {"processes": 2, "instances": {"max": 3}}},
            "learning.instances.max times learning.processes is 6",
        ),
        ({**PREPARES, "preparation": {"instances": {"max": 3}}}, "preparation.instances.max is 3"),
    ],
)
def test_an_instance_that_needs_more_than_there_are_is_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(TooFewGpusError, match=rf"{field}, but this machine has 2 GPUs \(5, 7\); lower it"):
        assignment(job(**spec), "5", "7")


def test_instances_that_learn_together_have_gpus_of_their_own_or_are_refused() -> None:
    learning = {"processes": 1, "instances": {"max": 2}}
    made = job(generation={"instances": {"max": 1}}, learning=learning)
    found = assignment(made, "0", "1", "2")
    assert (found.per_instance, found.shared) == ({"generation": 1, "preparation": 0, "learning": 1}, None)
    with pytest.raises(TooFewGpusError, match=r"can't take turns.* to 1 and learning\.processes to 2, or"):
        assignment(made, "0", "1")


def test_generation_ahead_leaves_the_learner_its_gpus() -> None:
    found = assignment(job(**{"async": {}}), *map(str, range(5)))
    assert (found.actors, found.shared) == (ActorRange(1, 4), None)


def test_each_instance_that_prepares_has_a_gpu_of_its_own_beside_generation() -> None:
    two = {**PREPARES, "preparation": {"instances": {"max": 2}}}
    assert assignment(job(**{"async": {}}, **two), *map(str, range(5))).actors == ActorRange(1, 2)
    with pytest.raises(TooFewGpusError, match=r"needs 4 GPUs at once, .* has 3; remove async, lower preparation\.inst"):
        assignment(job(**{"async": {}}, **two), "0", "1", "2")
    two["generation"] = {"instances": {"max": 2}}
    assert assignment(job(**two), *map(str, range(4))).shared is not None
    assert assignment(job(**two), *map(str, range(5))).shared is None


def test_generation_ahead_of_a_learner_on_the_same_gpu_is_refused() -> None:
    with pytest.raises(TooFewGpusError, match="async generates while it learns, which needs 2 GPUs at once"):
        assignment(job(**{"async": {}}), "0")


@pytest.mark.parametrize(
    ("gpus", "spec", "preparers"),
    [
        (4, {}, (1, 4)),
        (4, {"generation": {"instances": {"max": 2}}}, (1, 1)),
        (6, {"generation": {"instances": {"max": 2}}}, (1, 2)),
        (4, {"generation": {"vllm": {"tensorParallelSize": 2}}}, (1, 4)),
        (4, {"preparation": {"instances": {"min": 2}}}, (2, 4)),
        (4, {"preparation": {"instances": {"min": 2, "max": 3}}}, (2, 3)),
        (4, {"planning": {"policy": "even"}}, (1, 1)),
        (4, {"async": {}}, (1, 1)),
        (128, {}, (1, 64)),
        (0, {}, (1, 1)),
    ],
)
def test_as_many_instances_prepare_as_fit_on_the_gpus_of_generation(
    gpus: int, spec: dict[str, Any], preparers: tuple[int, int]
) -> None:
    """With one, a step of a 3B model whose responses a reference scores took 50 s instead of 37."""
    assert assignment(job(**PREPARES, **spec), *map(str, range(gpus))).preparers == ActorRange(*preparers)


def test_a_rehearsed_job_has_the_preparers_of_its_emulated_gpus() -> None:
    rehearsal = {"trace": "trace.parquet", "gpu": "L40S"}
    made = job(**PREPARES, rehearsal=rehearsal, generation={"instances": {"max": 8}})
    assert assignment(made).preparers == ActorRange(1, 8)


def test_a_queue_sets_no_quota_aside_for_preparers_that_the_job_does_not_name() -> None:
    gpus: dict[Stage, int] = {"generation": 1, "preparation": 1, "learning": 1}
    actors, spec = ActorRange(1, 8), job(**PREPARES).spec
    assert preparer_range(spec, actors, gpus) == ActorRange(1, 8)
    assert preparer_range(spec, actors, gpus, queued=True) == ActorRange(1, 1)
