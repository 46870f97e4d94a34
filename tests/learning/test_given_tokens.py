"""Tokens that an environment gave are read and never learnt from.

A plain float64 computation over the concatenated tokens says what the numbers must be: sample by sample, without
padding, packing or shared prompts, and a token at a time.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.objectives import policy_loss
from rlhfless_functions.data.estimates import estimate_samples
from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.model.forward import body_of, response_log_probs
from rlhfless_functions.model.micro_batches import WHOLE, Block
from rlhfless_functions.model.packed_attention import use_packing
from rlhfless_functions.model.shared_prompts import SharedPrompts
from rlhfless_functions.settings import (
    AlgorithmSettings,
    CriticSettings,
    ImportanceSamplingSettings,
    KlSettings,
    LearningSettings,
)
from tests.learning.jobs import LEFT_OUT
from tests.learning.steps import assert_same_gradients, learn_request, ragged_samples, take_step

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("warm_start")

CPU = torch.device("cpu")
TEMPERATURE = 0.8
COMPUTING: dict[str, LearningSettings] = {
    "padded": LearningSettings(pack="never", share_prompts=False),
    "packed": LearningSettings(pack="always", share_prompts=False),
    "shared prompts": LearningSettings(pack="never"),
    "shared prompts, packed": LearningSettings(pack="always"),
}
PER_TOKEN = ("log_probs", "old_log_probs", "reference_log_probs", "values", "advantages", "returns")


def conversation(sample: PreparedSample, draw: random.Random) -> PreparedSample:
    """The sample with spans between its tokens that nobody sampled, at its head and at its end too."""
    tokens, given, kept = list[int](), list[tuple[int, int]](), list[int]()
    for place in range(len(sample.response_tokens) + 1):
        if draw.random() < 0.4:
            length = draw.randint(1, 3)
            given.append((len(tokens), len(tokens) + length))
            tokens += [draw.randint(2, 50) for _ in range(length)]
        if place < len(sample.response_tokens):
            kept.append(len(tokens))
            tokens.append(sample.response_tokens[place])
    longer: dict[str, Any] = {}
    for name in PER_TOKEN:
        if (numbers := getattr(sample, name)) is not None:
            # Numbers at given tokens must not be read.
            longer[name] = [7e3] * len(tokens)
            for place, number in zip(kept, numbers, strict=True):
                longer[name][place] = number
    return replace(sample, response_tokens=tokens, given=given, versions=[VersionSpan(0, 0, len(tokens))], **longer)


def conversations(seed: int = 0, **given: Any) -> list[PreparedSample]:
    draw = random.Random(seed)
    samples = [conversation(sample, draw) for sample in ragged_samples(8, seed, **given)]
    assert sum(bool(sample.given) for sample in samples) > 4
    return samples


def sampled_places(sample: PreparedSample) -> list[int]:
    inside = {place for start, end in sample.given for place in range(start, end)}
    return [place for place in range(len(sample.response_tokens)) if place not in inside]


def plain_log_probs(model: PreTrainedModel, sample: PreparedSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the sampled tokens, from one pass over all tokens of the conversation."""
    tokens = torch.tensor([*sample.prompt_tokens, *sample.response_tokens])
    logits = model(input_ids=tokens[None]).logits[0].double() / TEMPERATURE
    every = torch.log_softmax(logits, dim=-1)
    before = torch.tensor([len(sample.prompt_tokens) + place - 1 for place in sampled_places(sample)])
    rows = every[before]
    return rows.gather(1, tokens[before + 1][:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def numbers(sample: PreparedSample, name: str) -> torch.Tensor:
    found = getattr(sample, name)
    return torch.tensor([found[place] for place in sampled_places(sample)], dtype=torch.float64)


def plain_loss(model: PreTrainedModel, samples: Sequence[PreparedSample]) -> torch.Tensor:
    """Decoupled PPO's first update with truncated importance weights, KL (k2) and an entropy bonus, by token."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        log_probs, entropy = plain_log_probs(model, sample)
        old = log_probs.detach()
        weight = (old - numbers(sample, "log_probs")).exp().clamp(max=2.0)
        ratio = (log_probs - old).exp()
        distance = (log_probs - numbers(sample, "reference_log_probs")).square() / 2
        total = total + (-weight * ratio * numbers(sample, "advantages") + 0.3 * distance - 0.1 * entropy).sum()
        count += len(log_probs)
    return total / count


ALGORITHM = AlgorithmSettings(
    kl=KlSettings(coefficient=0.3, estimator="k2"),
    entropy_coefficient=0.1,
    importance_sampling=ImportanceSamplingSettings(high=2.0),
)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("share", [False, True], ids=["whole samples", "shared prompts"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_loss_and_gradients_are_those_of_a_plain_computation(tiny_model: Path, packed: bool, share: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    samples = conversations()
    samples = [
        replace(sample, prompt_tokens=samples[row - row % 2].prompt_tokens) for row, sample in enumerate(samples)
    ]
    expected = plain_loss(model, samples)
    expected.backward()
    slopes = gradients(model)

    use_packing(body_of(model), packed)
    batch = TrainingBatch(samples, ALGORITHM.resolved(), 1)
    runs = [[0, 1, 2], [3, 4, 5, 6, 7]]
    block = Block([0, 2, 4, 6], runs) if share else WHOLE
    shared = (
        SharedPrompts(body_of(model), [samples[row].prompt_tokens for row in block.prompts], packed=packed)
        if share
        else None
    )
    total = torch.zeros((), dtype=torch.float64)
    divisor = normalizer(batch.counted, "token-mean", 99)
    assert divisor == sum(len(sampled_places(sample)) for sample in samples)
    for rows in runs:
        part = batch.select(block, rows, CPU, packed=packed)
        log_probs, entropy = response_log_probs(
            model, part.tokens, TEMPERATURE, prompts=shared, entropy=True, entropy_gradient=True
        )
        for place, row in enumerate(rows):
            theirs, _ = plain_log_probs(model, samples[row])
            ours = log_probs[place][part.tokens.response_mask[place]]
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
            assert part.tokens.response_mask[place].nonzero()[:, 0].tolist() == sampled_places(samples[row])
        loss = policy_loss(
            ALGORITHM,
            log_probs=log_probs,
            advantages=part.numbers["advantages"],
            mask=part.tokens.response_mask,
            entropy=entropy,
            sampler_log_probs=part.numbers["log_probs"],
            reference_log_probs=part.numbers["reference_log_probs"],
        )
        part_of_total = loss.total / divisor
        part_of_total.backward()
        total = total + part_of_total.detach()
    if shared is not None:
        shared.backward()
    torch.testing.assert_close(total.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(model), slopes, 1e-6)


@pytest.mark.parametrize("computing", COMPUTING)
def test_a_step_of_conversations_is_that_of_a_plain_computation(tiny_model: Path, computing: str) -> None:
    """The whole step of the learner, in float32."""
    samples = conversations(old_log_probs=None)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    request = learn_request(tiny_model, algorithm=ALGORITHM, learning=COMPUTING[computing])
    request = request.model_copy(update={"sampling": request.sampling.model_copy(update={"temperature": TEMPERATURE})})
    _, report, (ours,), _ = take_step(request, samples)
    plain_loss(model, samples).backward()
    assert_same_gradients({name: slope.double() for name, slope in ours.items()}, gradients(model), 1e-5)
    assert report.statistics["ratio"].data[0] == sum(len(sampled_places(sample)) for sample in samples)
    assert report.tokens + report.shared_tokens == sum(
        len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples
    )


def without_given(sample: PreparedSample) -> PreparedSample:
    """The sampled tokens alone, with their numbers."""
    places = sampled_places(sample)
    kept: dict[str, Any] = {
        name: None if (found := getattr(sample, name)) is None else [found[place] for place in places]
        for name in PER_TOKEN
    }
    tokens = [sample.response_tokens[place] for place in places]
    return replace(sample, response_tokens=tokens, given=[], versions=[VersionSpan(0, 0, len(tokens))], **kept)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmSettings(name="grpo"),
        AlgorithmSettings(name="rloo", kl=KlSettings(coefficient=0.2, placement="reward", estimator="k1")),
        AlgorithmSettings(name="reinforce_plus_plus", gamma=0.9),
        AlgorithmSettings(name="ppo", gamma=0.99, gae_lambda=0.9),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_advantages_step_over_given_tokens(algorithm: AlgorithmSettings) -> None:
    samples = conversations()
    ours = estimate_samples(samples, algorithm.resolved())
    plain = estimate_samples([without_given(sample) for sample in samples], algorithm.resolved())
    assert torch.equal(ours.advantages, plain.advantages)
    assert torch.equal(ours.mask, plain.mask)
    assert (ours.returns is None) == (plain.returns is None)
    assert ours.returns is None or torch.equal(ours.returns, plain.returns)


def test_gae_is_the_recursion_over_sampled_tokens(seed: int = 3) -> None:
    gamma, decay = 0.99, 0.9
    algorithm = AlgorithmSettings(name="ppo", gamma=gamma, gae_lambda=decay).resolved()
    samples = conversations(seed)
    ours = estimate_samples(samples, algorithm)
    for row, sample in enumerate(samples):
        values, after, following = numbers(sample, "values").tolist(), 0.0, 0.0
        expected = [0.0] * len(values)
        for place in reversed(range(len(values))):
            reward = sample.reward if place == len(values) - 1 else 0.0
            assert reward is not None
            after = reward + gamma * following - values[place] + gamma * decay * after
            following = values[place]
            expected[place] = after
        assert ours.advantages[row, : len(values)].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "reinforce_plus_plus"])
def test_every_number_of_a_batch_is_that_of_its_sampled_tokens(name: Any) -> None:
    algorithm, samples = AlgorithmSettings(name=name).resolved(), conversations()
    ours = TrainingBatch(samples, algorithm, 1)
    plain = TrainingBatch([without_given(sample) for sample in samples], algorithm, 1)
    assert ours.counted == plain.counted
    for rows in ([0, 1], list(range(8))):
        assert ours.normalizer(rows, 16) == plain.normalizer(rows, 16)
        one, other = ours.select(WHOLE, rows, CPU), plain.select(WHOLE, rows, CPU)
        assert one.numbers.keys() == other.numbers.keys()
        for number in one.numbers:
            assert torch.equal(
                one.numbers[number][one.tokens.response_mask], other.numbers[number][other.tokens.response_mask]
            )
            assert not one.numbers[number][~one.tokens.response_mask].any()


@pytest.mark.parametrize("computing", COMPUTING)
def test_the_learner_s_own_critic_values_sampled_tokens_alone(tiny_model: Path, computing: str) -> None:
    algorithm = AlgorithmSettings(name="ppo", epochs=2, critic=CriticSettings(learning_rate=1e-2))
    samples = conversations(**LEFT_OUT)
    request = learn_request(tiny_model, algorithm=algorithm, learning=COMPUTING[computing])
    _, report, _, critic = take_step(request, samples)
    assert len(critic) == 2
    assert report.statistics["value"].data[0] == 2 * sum(len(sampled_places(sample)) for sample in samples)
