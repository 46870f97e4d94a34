"""A job that was begun by an earlier version goes on: its document means the same, however it is written now."""

from typing import Any

import pytest

from rlhfless_operator.job.reading.earlier_documents import meaning
from rlhfless_operator.job.spec import RLHFJob, RLHFJobSpec
from rlhfless_operator.training.journal.begun_job import changes_between


def written(**algorithm: Any) -> dict[str, Any]:
    """A spec with this algorithm, as it is put into a job's folder today."""
    spec = RLHFJobSpec.model_validate(
        {
            "model": {"source": "m"},
            "rewards": [{"name": "r", "math": {}}],
            "data": {"source": "d"},
            "steps": 1,
            "algorithm": algorithm,
        },
        by_name=False,
    )
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def of_earlier(spec: dict[str, Any], **algorithm: Any) -> dict[str, Any]:
    """The spec with parts of its algorithm as an earlier version wrote them."""
    return {**spec, "algorithm": {**spec["algorithm"], **algorithm}}


@pytest.mark.parametrize(
    ("before", "now"),
    [({"cap": 2.0}, {}), ({"cap": 1.5}, {"high": 1.5}), ({}, {"mode": "none"})],
    ids=["the default", "a cap", "cap: null, which was left out"],
)
def test_the_cap_of_importance_weights_is_their_upper_bound(before: dict[str, Any], now: dict[str, Any]) -> None:
    earlier = of_earlier(written(), importanceSampling=before)
    assert meaning(earlier) == meaning(written(importanceSampling=now))


def test_the_estimator_that_was_the_default_is_still_the_one_of_the_loss_and_no_more_that_of_the_reward() -> None:
    in_loss = of_earlier(written(), kl={"coefficient": 0.1, "placement": "loss", "estimator": "k3"})
    assert meaning(in_loss) == meaning(written(kl={"coefficient": 0.1}))
    in_reward = of_earlier(written(), kl={"coefficient": 0.1, "placement": "reward", "estimator": "k3"})
    assert meaning(in_reward) != meaning(written(kl={"coefficient": 0.1, "placement": "reward"}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"clipLow": 0.1}, {"clipLow": 0.2}),
        ({"name": "ppo", "critic": {"valueClip": None}}, {"name": "ppo", "critic": {}}),
        ({"importanceSampling": {"high": 3}}, {}),
        ({"name": "dapo"}, {}),
    ],
)
def test_a_change_is_still_a_change(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert meaning(written(**one)) != meaning(written(**other))


def test_what_is_no_spec_any_more_is_left_as_it_is() -> None:
    assert meaning({"algorithm": {"name": "lost"}}) == {"algorithm": {"name": "lost"}}


def begun(**generation: Any) -> RLHFJob:
    return RLHFJob.model_validate(
        {
            "apiVersion": "rlhfless.io/v1alpha1",
            "kind": "RLHFJob",
            "metadata": {"name": "job"},
            "spec": {
                "model": {"source": "m"},
                "rewards": [{"name": "r", "math": {}}],
                "data": {"source": "d"},
                "steps": 1,
                "generation": generation,
            },
        }
    )


def test_one_instance_that_an_earlier_version_wrote_by_itself_is_no_change() -> None:
    job = begun()
    earlier = written()
    earlier["generation"]["instances"]["max"] = 1
    assert changes_between({"spec": earlier}, job) == []
    earlier["generation"]["instances"]["max"] = 2
    assert [change.path for change in changes_between({"spec": earlier}, job)] == ["spec.generation.instances.max"]
