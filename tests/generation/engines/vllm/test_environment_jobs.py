"""Whole jobs on vLLM whose model acts in an environment: kills in mid-episode lose no sample."""

import pytest

from tests.training.environment_jobs import MakeJob, finish, kill_in_mid_episode, learnt_samples
from tests.training.environment_jobs import make_job as make_job  # A fixture.
from tests.training.whole_jobs import records_of

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "victim",
    [
        None,
        "driver",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("generation-", "rlhfless_functions.environments")),
    ],
)
def test_episodes_are_whole_and_what_was_sampled_is_what_the_trainer_computes(
    make_job: MakeJob, victim: str | None
) -> None:
    file = make_job(f"killed-{(victim or 'nobody').strip('-').replace('_', '-').replace('.', '-')}", 1, "vllm")
    if victim is None:
        finish(file)
    else:
        kill_in_mid_episode(file, victim)
    assert "generation runs on vllm (" in (file.parent / "log.txt").read_text()
    samples = learnt_samples(file)
    assert len(samples) == 2 * 4 * 3
    assert all(sample.outcome is not None and sample.given for sample in samples)
    assert max(len(sample.given) for sample in samples) > 2
    metrics = [record["metrics"] for record in records_of(file)]
    assert all(1 <= each["mismatch/mean_exp_abs"] < 1.01 for each in metrics), "turns follow from what was before them"
    assert sum(each["generation/lost_instances"] for each in metrics) == (victim == "generation-")
    assert sum(each["environment/restarted"] for each in metrics) == 0, "the example's environment is replayable"
