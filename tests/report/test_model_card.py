"""The card that describes a trained model to those who find it."""

from importlib.metadata import Distribution
from typing import Any

import pytest
import yaml

from rlhfless_functions.api import Prompting
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.report import model_card
from tests.report.builders import job

SUMMARY = {
    "steps": 4,
    "seconds": 91.0,
    "instance_seconds": 300.4,
    "cost": "0.0083",
    "currency": "USD",
    "reward_first": 0.42,
    "reward_last": 0.88,
    "held_out_reward_before": 0.415,
    "held_out_reward_after": 0.899,
}


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_says_how_the_model_was_trained() -> None:
    card = model_card(RLHFJob.model_validate(job()), SUMMARY)
    assert front_matter(card)["library_name"] == "transformers"
    for part in (
        "trained with PPO ([arXiv 1707.06347]",
        "0.415 before, 0.899 after",
        "0.420 in the first step, 0.880 in the last",
        "0.0083 USD",
        "gae, normalised by batch",
        "exact (exact_match, weight 1)",
        "adamw, learning rate 1e-06",
        "AutoModelForCausalLM.from_pretrained",
    ):
        assert part in card


def test_the_card_shows_how_training_made_its_prompts() -> None:
    chat = Prompting(chat=True, system_prompt="be brief", chat_template_kwargs={"effort": "low"}, stop=["\n"])
    card = model_card(RLHFJob.model_validate(job()), SUMMARY, chat)
    assert '[{"role": "system", "content": "be brief"}, {"role": "user", "content": "…"}]' in card
    assert "effort='low'" in card and "stop_strings=['\\n']" in card
    assert 'tokenizer("…"' in model_card(RLHFJob.model_validate(job()), SUMMARY, Prompting(chat=False))


def test_the_card_is_written_where_the_sources_run_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "discover", classmethod(lambda cls, **context: iter([])))
    assert "by rlhfless.\n" in model_card(RLHFJob.model_validate(job()), SUMMARY)


def test_the_card_does_not_tell_strangers_where_files_lay() -> None:
    card = model_card(RLHFJob.model_validate(job()), SUMMARY)
    assert "someone" not in card
    assert "prompts.jsonl" in card
    assert "base_model" not in front_matter(card)


def test_the_card_names_a_base_model_of_the_hub_and_an_adapter() -> None:
    for export, library, loader in (
        ("adapter", "peft", "AutoPeftModelForCausalLM.from_pretrained"),
        ("merged", "transformers", "AutoModelForCausalLM.from_pretrained"),
    ):
        model = {"source": "Qwen/Qwen3-0.6B", "lora": {"rank": 8, "export": export}}
        card = model_card(RLHFJob.model_validate(job(model=model)), {})
        assert front_matter(card)["base_model"] == "Qwen/Qwen3-0.6B"
        assert front_matter(card)["library_name"] == library
        assert loader in card
        assert "LoRA, rank 8" in card
        assert "Results" not in card


def test_the_jobs_document_in_the_card_is_a_job() -> None:
    card = model_card(RLHFJob.model_validate(job()), SUMMARY)
    document = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert RLHFJob.model_validate(document).spec.algorithm.name == "ppo"
