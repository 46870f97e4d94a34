"""Advantages of samples: with a critic, those of a sample do not depend on the other samples."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.data.estimates import estimate_samples
from rlhfless_functions.data.rollouts import read_prepared, write_prepared
from rlhfless_functions.settings import AlgorithmSettings, KlSettings
from tests.learning.steps import ragged_samples

PPO = AlgorithmSettings(name="ppo", gamma=0.98, gae_lambda=0.93).resolved()
IN_REWARD = AlgorithmSettings(
    name="ppo", gamma=0.98, gae_lambda=0.93, kl=KlSettings(coefficient=0.2, placement="reward", estimator="k1")
).resolved()


@pytest.mark.parametrize("algorithm", [PPO, IN_REWARD], ids=["ppo", "penalty in the reward"])
@given(seed=st.integers(0, 99), rows=st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
@settings(max_examples=50, deadline=None)
def test_with_a_critic_a_sample_s_numbers_do_not_depend_on_the_others(
    algorithm: AlgorithmSettings, seed: int, rows: list[int]
) -> None:
    samples = ragged_samples(seed=seed)
    together = estimate_samples([samples[row] for row in rows], algorithm)
    assert together.returns is not None
    for place, row in enumerate(rows):
        alone = estimate_samples([samples[row]], algorithm)
        assert alone.returns is not None
        length = len(samples[row].response_tokens)
        assert torch.equal(together.advantages[place, :length], alone.advantages[0])
        assert torch.equal(together.returns[place, :length], alone.returns[0])
        assert not together.advantages[place, length:].any()


def test_samples_that_were_stored_have_the_same_numbers(tmp_path: Path) -> None:
    """The learner reads what preparation wrote; log-probabilities come from a model, in float32."""
    samples = ragged_samples()
    for sample in samples:
        for name in ("old_log_probs", "reference_log_probs", "values"):
            setattr(sample, name, torch.tensor(getattr(sample, name)).tolist())
    write_prepared(str(tmp_path / "part.parquet"), samples)
    stored = list(read_prepared([str(tmp_path / "part.parquet")]).values())
    ours, theirs = (estimate_samples(each, IN_REWARD) for each in (stored, samples))
    assert torch.equal(ours.advantages, theirs.advantages)
