"""Jobs from OpenRLHF's options: numbers that mean something else than they seem to."""

import pytest

from rlhfless_operator.convert import convert, job_yaml
from rlhfless_operator.convert.reading import Configuration
from rlhfless_operator.job.reading.validation import parse_job


@pytest.mark.parametrize(("theirs", "ours"), [(-1, 0), (5, 5)])
def test_the_critic_warms_up_for_as_many_steps_as_the_actor_is_frozen(theirs: int, ours: int) -> None:
    options = {"pretrain": "org/model", "prompt_data": "org/data", "advantage_estimator": "gae"}
    given = {**options, "n_samples_per_prompt": 4, "freezing_actor_steps": theirs}
    spec = parse_job(job_yaml(convert(Configuration("openrlhf", given), "x.yaml", 1))).spec
    critic = spec.algorithm.resolved().critic
    assert critic is not None
    assert critic.warmup_steps == ours
