"""Critics: a policy's body with a head, as transformers loads it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import CriticModel, load_critic, publish_critic, swap_critic
from tests.weights.random_models import CONFIGS, TOKENS, nudge, random_model, settings_of, token_values, version
from tests.weights.random_models import tiny as tiny  # A fixture.


@pytest.mark.parametrize("name", CONFIGS)
def test_a_critic_is_the_policys_body_with_a_head_of_zeros(name: str, tmp_path: Path) -> None:
    folder = random_model(CONFIGS[name], tmp_path / "model")
    critic = load_critic(settings_of(folder), version(folder))
    with torch.no_grad():
        assert torch.equal(token_values(critic, TOKENS), torch.zeros(2, 20))
        torch.nn.init.normal_(critic.score.weight)
        body = AutoModelForCausalLM.from_pretrained(folder).base_model
        expected = body(TOKENS).last_hidden_state @ critic.score.weight[0]
        torch.testing.assert_close(token_values(critic, TOKENS), expected)
    publish_critic(str(tmp_path / "1"), critic)
    again = load_critic(settings_of(folder), version(tmp_path / "1", 1))
    with torch.no_grad():
        assert torch.equal(token_values(again, TOKENS), token_values(critic, TOKENS))


def test_a_critic_is_swapped_in_place_whole_or_not_at_all(tiny: ModelSettings, tmp_path: Path) -> None:
    critic, other = (load_critic(tiny, version(tiny.source)) for _ in range(2))
    nudge(critic)
    publish_critic(str(tmp_path / "1"), critic)
    swap_critic(other, version(tmp_path / "1", 1))
    with torch.no_grad():
        values = token_values(critic, TOKENS)
        assert torch.equal(token_values(other, TOKENS), values)
    with pytest.raises(TaskError, match="give a critic that this job published"):
        swap_critic(other, version(tiny.source))
    with torch.no_grad():
        assert torch.equal(token_values(other, TOKENS), values)


def test_a_published_critic_is_a_sequence_classifier_with_one_label(tiny: ModelSettings, tmp_path: Path) -> None:
    critic = load_critic(tiny, version(tiny.source))
    nudge(critic)
    publish_critic(str(tmp_path / "1"), critic)
    tokens = TOKENS.clamp(min=2)  # It scores the last token that is no padding.
    with torch.no_grad():
        score = AutoModelForSequenceClassification.from_pretrained(tmp_path / "1")(tokens).logits
        torch.testing.assert_close(score[:, 0], token_values(critic, tokens)[:, -1])


def test_the_head_stays_float32_whatever_the_body_is(tiny: ModelSettings, tmp_path: Path) -> None:
    half = tiny.model_copy(update={"dtype": "bfloat16"})
    critic = load_critic(tiny, version(tiny.source))
    nudge(critic)
    publish_critic(str(tmp_path / "1"), critic, torch.bfloat16)
    loaded: CriticModel = load_critic(half, version(tmp_path / "1", 1))
    assert loaded.body.dtype == torch.bfloat16
    assert torch.equal(loaded.score.weight, critic.score.weight)
    with torch.no_grad():
        assert token_values(loaded, TOKENS).dtype == torch.float32
        torch.testing.assert_close(token_values(loaded, TOKENS), token_values(critic, TOKENS), atol=0.1, rtol=0.1)
