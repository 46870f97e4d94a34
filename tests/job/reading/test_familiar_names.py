"""What trl, verl and OpenRLHF call a field or a choice leads to ours."""

import pytest
import yaml

from rlhfless_operator.job.reading import familiar_names
from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.spec import RLHFJob
from tests.job.good_document import GOOD, only


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "spec.batch.samplesPerPrompt"),
        ("rollout.n", "spec.batch.samplesPerPrompt"),
        ("group_size", "spec.batch.samplesPerPrompt"),
        ("numGenerations", "spec.batch.samplesPerPrompt"),
        ("beta", "spec.algorithm.kl.coefficient"),
        ("kl_loss_coef", "spec.algorithm.kl.coefficient"),
        ("init_kl_coef", "spec.algorithm.kl.coefficient"),
        ("epsilon", "spec.algorithm.clipLow and spec.algorithm.clipHigh"),
        ("clip_ratio_low", "spec.algorithm.clipLow"),
        ("max_completion_length", "spec.sampling.maxResponseTokens"),
        ("max_prompt_length", "spec.sampling.maxPromptTokens"),
        ("train_batch_size", "spec.batch.promptsPerStep"),
        ("rollout_batch_size", "spec.batch.promptsPerStep"),
        ("ppo_mini_batch_size", "spec.batch.minibatchSamples"),
        ("loss_agg_mode", "spec.algorithm.aggregation"),
        ("adv_estimator", "spec.algorithm.advantage"),
        ("num_iterations", "spec.algorithm.epochs"),
        ("vllm_importance_sampling_clip_max", "spec.algorithm.importanceSampling.high"),
        ("rollout_is", "spec.algorithm.importanceSampling.level"),
        (
            "vllm_importance_sampling_mode",
            "spec.algorithm.importanceSampling.mode and spec.algorithm.importanceSampling.level",
        ),
        ("tau_pos", "spec.algorithm.sapoTemperaturePositive"),
        ("ppo_epochs", "spec.algorithm.epochs"),
        ("scale_rewards", "spec.algorithm.advantageNormalization"),
        ("mask_truncated_completions", "spec.algorithm.maskTruncated"),
        ("run_name", "metadata.name"),
    ],
)
@pytest.mark.parametrize("section", ["algorithm", "batch", "sampling", "model"])
def test_names_from_trl_verl_and_openrlhf_lead_to_ours(theirs: str, ours: str, section: str) -> None:
    document = yaml.safe_load(GOOD)
    document["spec"][section][theirs] = 1
    assert str(only(yaml.safe_dump(document))) == f"spec.{section}.{theirs}: unknown field; it is {ours} here"


def test_every_name_in_the_table_leads_to_a_field_and_none_to_two() -> None:
    known = {".".join(path) for path, _ in walk(RLHFJob)}
    for ours in familiar_names.FIELDS:
        assert {f"spec.{part.removeprefix('spec.')}" for part in ours.split(" and ")} <= known
    everything = [theirs for names in familiar_names.FIELDS.values() for theirs in names]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("name: ppo", "reinforce++", "reinforce_plus_plus"),
        ("name: ppo", "Dr_GRPO", "dr_grpo"),
        ("schedule: cosine", "cosin", "cosine"),
        ("estimator: k1", "low_var_kl", "k3"),
        ("clipLow: 0.1", "token_mean", "token-mean"),
    ],
)
def test_what_others_call_a_choice_leads_to_ours(field: str, theirs: str, ours: str) -> None:
    name = field.split(":")[0] if field != "clipLow: 0.1" else "aggregation"
    assert f"did you mean {ours}?" in only(GOOD.replace(field, f"{name}: {theirs}")).remedy
