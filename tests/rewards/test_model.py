"""A sequence-classification reward model: a decoder with and without a padding token of its own."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelReward, RewardSettings, SamplingSettings

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tiny_model, tmp_path_factory.mktemp("reward-model"))


def make_model(tiny_model: Path, folder: Path, labels: int = 1) -> Path:
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(1)
    config = Qwen3Config.from_pretrained(tiny_model, num_labels=labels)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_group(*completions: str, text: str = "1+2=", messages: list[dict[str, str]] | None = None) -> RewardGroup:
    size = len(completions)
    return RewardGroup(5, text, messages, list(completions), [[1]] * size, ["stop"] * size, {})


def score(folder: Path, *groups: RewardGroup, **settings: object) -> list[list[float | None]]:
    reward = RewardSettings(name="judge", model=ModelReward(source=str(folder)), **settings)
    return RewardScorer().score([reward], groups, SamplingSettings()).totals


def logit(folder: Path, text: str) -> float:
    """What the model says of a text alone, without any padding."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])
    model = Qwen3ForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


def test_the_score_is_the_logit_whatever_else_is_in_the_batch(reward_model: Path) -> None:
    (first, second), (third,) = score(reward_model, make_group("3", "a much longer answer"), make_group("12", text="7"))
    assert first == pytest.approx(logit(reward_model, "1+2=3"), abs=1e-5)
    assert second == pytest.approx(logit(reward_model, "1+2=a much longer answer"), abs=1e-5)
    assert third == pytest.approx(logit(reward_model, "712"), abs=1e-5)


def test_without_a_padding_token_the_scores_are_the_same(reward_model: Path, tmp_path: Path) -> None:
    groups = [make_group("3", "4", "a much longer answer"), make_group("12")]
    expected = [total for group in score(reward_model, *groups) for total in group]
    folder = shutil.copytree(reward_model, tmp_path / "unpadded")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    assert [total for group in score(folder, *groups) for total in group] == pytest.approx(expected, abs=1e-5)


def test_chat_prompts_go_through_the_models_own_template(reward_model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+2="}]
    folder = shutil.copytree(reward_model, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ((total,),) = score(folder, make_group("3", messages=messages))
    assert total == pytest.approx(logit(folder, "u:1+2=\na:3\n"), abs=1e-5)
    with pytest.raises(TaskError, match="has no chat template"):
        score(reward_model, make_group("3", messages=messages))


def test_a_model_of_several_labels_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_model(tiny_model, tmp_path / "two", labels=2)
    with pytest.raises(TaskError, match=r"reward 'judge' needs a model with one label, but .*two has 2"):
        score(folder, make_group("3"))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"reward 'judge' cannot load the reward model .*nowhere") as raised:
        score(tmp_path / "nowhere", make_group("3"))
    assert raised.value.reason == "reward_failed"


def test_a_text_longer_than_the_model_can_read_is_an_error_of_its_group(reward_model: Path) -> None:
    totals = score(reward_model, make_group("3"), make_group("9" * 600), on_error="unscorable")
    assert totals[0][0] is not None and totals[1] == [None]
    with pytest.raises(TaskError, match="got 604 tokens, more than the 512 positions"):
        score(reward_model, make_group("9" * 600))


def test_a_model_that_answers_nan_is_an_error(reward_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(reward_model, folder)
    model = Qwen3ForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.score.weight, math.nan)
    model.save_pretrained(folder)
    with pytest.raises(TaskError, match="that is not finite"):
        score(folder, make_group("3"))
