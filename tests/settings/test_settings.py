"""Settings: units that are written and read, and algorithms that are composed by name."""

from decimal import Decimal
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rlhfless_functions.settings import (
    AlgorithmName,
    AlgorithmSettings,
    BatchSettings,
    Bytes,
    CriticSettings,
    Duration,
    DurationOrZero,
    KlSettings,
    LengthReward,
    MathReward,
    ModelSettings,
    Money,
    RewardSettings,
    SamplingSettings,
    Settings,
)
from rlhfless_functions.settings.base import format_bytes, format_duration, format_money, parse_bytes, parse_duration
from rlhfless_functions.settings.rewards import RewardKind


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("1h30m", 5400), ("500ms", 0.5), ("1.5m", 90), ("2d", 172800), ("0s", 0)]
)
def test_durations_are_numbers_with_units(text: str, seconds: float) -> None:
    assert TypeAdapter(DurationOrZero).validate_python(text, strict=True) == seconds


@pytest.mark.parametrize("text", ["30", "s", "-1s", "1 s", "1h 30m", "1e3s", "1s1", "", "١s", "1w"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="write a number with its unit"):
        TypeAdapter(DurationOrZero).validate_python(text)


def test_a_duration_is_longer_than_nothing_unless_it_may_be_zero() -> None:
    assert TypeAdapter(DurationOrZero).validate_python("0s") == 0
    with pytest.raises(ValidationError, match="longer than 0s"):
        TypeAdapter(Duration).validate_python("0s")


@given(st.floats(min_value=0, max_value=1e9))
def test_every_duration_is_read_as_it_was_written(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_durations_are_written_short() -> None:
    written = [format_duration(seconds) for seconds in (0.0, 0.25, 1e-7, 90.0, 600.0, 3600.0, 86400.0)]
    assert written == ["0s", "250ms", "0.0000001s", "90s", "10m", "1h", "1d"]


@pytest.mark.parametrize(
    ("text", "count"), [("16Gi", 2**34), ("512Mi", 2**29), ("1.5Gi", 3 * 2**29), ("2G", 2 * 10**9), ("1024", 1024)]
)
def test_memory_is_a_number_with_a_unit(text: str, count: int) -> None:
    assert TypeAdapter(Bytes).validate_python(text, strict=True) == count


@pytest.mark.parametrize("text", ["16GB", "-1Gi", "Gi", "1 Gi", "1e3", "", "9" * 400 + "Ti"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="512Mi or 16Gi"):
        TypeAdapter(Bytes).validate_python(text)


@given(st.integers(min_value=0, max_value=2**62))
def test_every_amount_of_memory_is_read_as_it_was_written(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


def test_prices_are_exact() -> None:
    price = TypeAdapter(Money).validate_python("0.10", strict=True)
    assert price == Decimal("0.10")
    assert 3 * price == Decimal("0.30")


@given(st.decimals("0.0000000001", 10**9, allow_nan=False, allow_infinity=False) | st.just(Decimal("0E-9")))
def test_every_price_is_read_as_it_was_written(amount: Decimal) -> None:
    assert TypeAdapter(Money).validate_python(format_money(amount)) == amount


@pytest.mark.parametrize("price", ["1,5", "-1", "$2", "1e3", "", float("inf"), True, None])
def test_what_is_no_price_is_refused(price: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Money).validate_python(price, strict=True)


def test_names_are_camel_case_in_documents_and_snake_case_in_python() -> None:
    assert SamplingSettings.model_validate({"maxResponseTokens": 5}).max_response_tokens == 5
    assert SamplingSettings(max_response_tokens=5).model_dump()["max_response_tokens"] == 5
    assert SamplingSettings().model_dump(by_alias=True)["maxResponseTokens"] == 1024


@pytest.mark.parametrize("fields", [{"sourc": "x"}, {"source": 1}, {"source": ""}, {}, {"source": "x", "dtype": "fp8"}])
def test_settings_are_strict(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelSettings.model_validate(fields)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SamplingSettings().temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf")])
def test_a_temperature_is_positive_and_finite(temperature: float) -> None:
    with pytest.raises(ValidationError):
        SamplingSettings(temperature=temperature)


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_a_name_stands_for_every_choice(name: AlgorithmName) -> None:
    whole = AlgorithmSettings(name=name).resolved()
    undecided = {field for field in AlgorithmSettings.model_fields if getattr(whole, field) is None}
    assert undecided <= {"dual_clip", "critic", "whiten_over"} | (
        {"clip_low", "clip_high"} if whole.clip == "sapo" else set()
    )
    assert (whole.critic is not None) == (whole.advantage == "gae")
    assert whole.resolved() == whole
    # What is resolved is itself a valid document.
    assert AlgorithmSettings.model_validate(whole.model_dump()) == whole


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("ppo", {"advantage": "gae", "advantage_normalization": "batch"}),
        ("grpo", {"advantage": "group", "advantage_normalization": "group", "aggregation": "token-mean"}),
        ("rloo", {"advantage": "leave_one_out", "advantage_normalization": "none", "ratio_level": "sequence_product"}),
        ("reinforce_plus_plus", {"advantage": "discounted", "advantage_normalization": "batch"}),
        ("dr_grpo", {"advantage_normalization": "none", "aggregation": "seq-mean-token-sum-norm"}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling_rounds": 4, "aggregation": "token-mean"}),
        ("gspo", {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("cispo", {"clip": "cispo"}),
        ("gmpo", {"clip": "gmpo", "ratio_level": "sequence", "aggregation": "seq-mean-token-mean"}),
        ("sapo", {"clip": "sapo", "ratio_level": "token", "clip_low": None, "aggregation": "seq-mean-token-mean"}),
    ],
)
def test_the_compositions_are_those_of_the_papers(name: AlgorithmName, choices: dict[str, Any]) -> None:
    whole = AlgorithmSettings(name=name).resolved()
    assert {field: getattr(whole, field) for field in choices} == choices


def test_a_job_may_override_each_choice() -> None:
    whole = AlgorithmSettings(name="dapo", clip_high=0.3, kl=KlSettings(coefficient=0.1)).resolved()
    assert (whole.clip_high, whole.clip_low, whole.kl) == (0.3, 0.2, KlSettings(coefficient=0.1, estimator="k3"))


def test_zero_is_a_choice_too() -> None:
    assert AlgorithmSettings(name="dapo", dynamic_sampling_rounds=0, clip_low=0.0).resolved().clip_low == 0.0


def test_the_critic_comes_and_goes_with_the_advantage() -> None:
    assert AlgorithmSettings(name="ppo", advantage="discounted").resolved().critic is None
    with_critic = AlgorithmSettings(name="grpo", advantage="gae", advantage_normalization="batch").resolved()
    assert with_critic.critic == CriticSettings()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "grpo", "critic": {}}, "grpo has no critic"),
        ({"name": "ppo", "advantageNormalization": "group"}, "needs advantage: group"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "gradient of mean zero"),
        ({"kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k3"}}, "use k1, or placement: loss"),
        ({"kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k2"}}, "use k1, or placement: loss"),
        ({"importanceSampling": {"low": 3.0}}, "low: 3 is not less than high, 2; lower it"),
        ({"name": "gmpo", "dualClip": 3.0}, "dualClip: it bounds the objective of clip: ppo"),
        ({"name": "sapo", "clipHigh": 0.3}, "clipHigh: sapo uses a gate instead of bounds"),
        ({"name": "grpo", "sapoTemperatureNegative": 2.0}, "sapoTemperatureNegative: only sapo has a gate"),
        ({"name": "gmpo", "ratioLevel": "token"}, "ratioLevel: gmpo is a geometric mean"),
        ({"clip": "gmpo"}, "ratioLevel: gmpo is a geometric mean"),
        ({"name": "ppo", "clip": "gmpo", "ratioLevel": "sequence"}, "clip: gmpo needs one advantage per sample"),
        ({"name": "rloo", "advantageNormalization": "group_per_reward"}, "group_per_reward needs advantage: group"),
        (
            {
                "advantageNormalization": "group_per_reward",
                "kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k1"},
            },
            "set placement: loss",
        ),
        ({"whitenOver": "samples"}, "whitenOver: advantageNormalization: group does not whiten; remove it"),
        (
            {"name": "ppo", "whitenOver": "samples"},
            "whitenOver: the tokens of a response have different gae",
        ),
        ({"name": "cispo", "dualClip": 3.0}, "dualClip: cispo"),
        ({"name": "grpo", "gamma": 0.99}, "gamma: group advantages have no discount"),
        ({"name": "reinforce_plus_plus", "gaeLambda": 0.95}, "gaeLambda: discounted advantages"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmSettings.model_validate(fields)


@pytest.mark.parametrize(("placement", "estimator"), [("reward", "k1"), ("loss", "k3")])
def test_the_estimator_follows_from_its_place(placement: Any, estimator: str) -> None:
    whole = AlgorithmSettings(kl=KlSettings(coefficient=0.1, placement=placement)).resolved()
    assert whole.kl == KlSettings(coefficient=0.1, placement=placement, estimator=estimator)


def test_the_bounds_come_and_go_with_the_clip() -> None:
    assert AlgorithmSettings(clip="sapo").resolved().clip_low is None
    assert AlgorithmSettings(name="sapo", clip="ppo").resolved().clip_low == 0.2


def test_k1_is_right_in_the_reward_and_harmless_without_weight() -> None:
    KlSettings(coefficient=0.1, placement="reward", estimator="k1")
    KlSettings(coefficient=0.0, placement="loss", estimator="k1")


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 2048))
def test_a_minibatch_divides_the_step(prompts: int, samples: int, minibatch: int) -> None:
    fields = {"prompts_per_step": prompts, "samples_per_prompt": samples, "minibatch_samples": minibatch}
    if prompts * samples % minibatch == 0:
        assert BatchSettings(**fields).minibatch_samples == minibatch
    else:
        with pytest.raises(ValidationError, match="does not divide"):
            BatchSettings(**fields)


_A_REWARD_OF_EACH_KIND: dict[str, dict[str, Any]] = {
    "python": {"file": "r.py"},
    "http": {"url": "http://localhost:1/score"},
    "model": {"source": "rm"},
    "exact_match": {},
    "math": {},
    "format": {"pattern": "x"},
    "length": {"buffer_tokens": 4},
    "code": {},
    "environment": {},
}


@pytest.mark.parametrize("kind", get_args(RewardKind))
def test_a_reward_knows_its_kind(kind: str) -> None:
    assert RewardSettings.model_validate({"name": "r", kind: _A_REWARD_OF_EACH_KIND[kind]}).kind == kind


def test_a_reward_has_exactly_one_kind() -> None:
    with pytest.raises(ValidationError, match="it has none"):
        RewardSettings(name="r")
    with pytest.raises(ValidationError, match="it has math and length"):
        RewardSettings(name="r", math=MathReward(), length=LengthReward(buffer_tokens=4))


@pytest.mark.parametrize(("value", "fits"), [(2**63 - 1, True), (2**63, False)])
def test_integers_are_those_that_an_api_server_has(value: int, fits: bool) -> None:
    class Limits(Settings):
        """Settings with a number that has no bound of its own."""

        retries: int

    if fits:
        assert Limits.model_validate({"retries": value}).retries == value
    else:
        with pytest.raises(ValidationError, match="not a 64-bit integer"):
            Limits.model_validate({"retries": value})
