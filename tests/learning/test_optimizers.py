"""AdamW, Muon, clipping and schedules."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from rlhfless_functions.learning.optimizers import ModelOptimizer, NonFiniteGradientError, schedule_factor
from rlhfless_functions.settings import OptimizerSettings

torch.set_num_threads(1)


class Tiny(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.hidden(self.embedding(ids)))))


def settings(**given: Any) -> OptimizerSettings:
    return OptimizerSettings(**{"learning_rate": 0.01, "max_gradient_norm": 100.0, **given})


def set_gradients(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_adamw_takes_the_paper_s_step() -> None:
    model = Tiny()
    optimizer = ModelOptimizer(model, settings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1))
    before, moments = values(model), {}
    for round_ in (1, 2, 3):
        set_gradients(model, round_)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            first, second = moments.get(name, (0.0, 0.0))
            first, second = 0.9 * first + 0.1 * parameter.grad, 0.95 * second + 0.05 * parameter.grad**2
            moments[name] = first, second
            decay = 0.1 if name == "hidden.weight" else 0.0
            update = (first / (1 - 0.9**round_)) / ((second / (1 - 0.95**round_)).sqrt() + 1e-8)
            before[name] = before[name] * (1 - 0.005 * decay) - 0.005 * update
        optimizer.update(0.5)
    for name, value in values(model).items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_in_the_host_s_memory_is_the_same_step(name: Any) -> None:
    models = {offload: Tiny() for offload in (False, True)}
    states = {}
    for offload, model in models.items():
        optimizer = ModelOptimizer(model, settings(name=name, weight_decay=0.1, offload=offload))
        for round_ in (1, 2):
            set_gradients(model, round_)
            optimizer.update(0.5)
            assert all(parameter.grad is None for parameter in model.parameters())
        states[offload] = optimizer.state()
    resumed = Tiny()
    resumed.load_state_dict(models[True].state_dict())
    optimizer = ModelOptimizer(resumed, settings(name=name, weight_decay=0.1, offload=True))
    optimizer.restore(states[False])
    other = ModelOptimizer(models[False], settings(name=name, weight_decay=0.1))
    other.restore(states[True])
    for model, its in ((resumed, optimizer), (models[False], other)):
        set_gradients(model, 3)
        its.update(1.0)
    for value, expected in zip(values(resumed).values(), values(models[False]).values(), strict=True):
        assert torch.equal(value, expected)


def test_the_host_s_copy_follows_parameters_that_were_restored() -> None:
    trained, fresh = Tiny(), Tiny()
    optimizer = ModelOptimizer(trained, settings(offload=True))
    set_gradients(trained)
    optimizer.update(1.0)
    other = ModelOptimizer(fresh, settings(offload=True))
    fresh.load_state_dict(trained.state_dict())
    other.restore(copy.deepcopy(optimizer.state()))
    for model, its in ((trained, optimizer), (fresh, other)):
        set_gradients(model, 2)
        its.update(1.0)
    for value, expected in zip(values(fresh).values(), values(trained).values(), strict=True):
        assert torch.equal(value, expected)


def test_norms_biases_embeddings_and_heads_do_not_decay() -> None:
    model = Tiny()
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    ModelOptimizer(model, settings(weight_decay=0.5)).update(1.0)
    changed = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert changed == {"hidden.weight"}


def test_adapters_on_embeddings_and_heads_do_not_decay_either() -> None:
    config = LoraConfig(r=2, target_modules=["embedding", "hidden", "head"], init_lora_weights=False)
    model = get_peft_model(Tiny(), config)
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    ModelOptimizer(model, settings(weight_decay=0.5)).update(1.0)
    changed = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert changed == {f"base_model.model.hidden.lora_{part}.default.weight" for part in "AB"}


def test_muon_orthogonalises_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    with_muon, with_adamw = Tiny(), Tiny()
    before = values(with_muon)
    for model, name in ((with_muon, "muon"), (with_adamw, "adamw")):
        optimizer = ModelOptimizer(model, settings(name=name, beta1=0.9))
        set_gradients(model)
        optimizer.update(1.0)
    for name, value in values(with_muon).items():
        same = torch.equal(value, values(with_adamw)[name])
        assert same == (name != "hidden.weight"), name
    update = values(with_muon)["hidden.weight"] - before["hidden.weight"]
    singular = torch.linalg.svdvals(update)
    assert singular.max() / singular.min() < 2, "all directions are moved about equally far"
    # Scaled to AdamW's size: root mean square of an update is 0.2 × the learning rate.
    assert update.square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.35)


def test_frozen_parameters_stay() -> None:
    model = Tiny()
    before = values(model)
    optimizer = ModelOptimizer(model, settings(name="muon", weight_decay=0.1))
    set_gradients(model)
    optimizer.update(1.0)
    assert torch.equal(values(model)["frozen.weight"], before["frozen.weight"])
    assert all(parameter.grad is None for parameter in model.parameters()), "gradients are cleared"


def test_gradients_are_scaled_down_to_the_largest_norm() -> None:
    clipped, plain = Tiny(), Tiny()
    norms = []
    for model, largest in ((clipped, 0.5), (plain, 1e6)):
        # Plain SGD's behaviour shows in the second moment: with epsilon large, AdamW's first step is g · lr / ε.
        optimizer = ModelOptimizer(model, settings(max_gradient_norm=largest, epsilon=100.0))
        before = values(model)
        set_gradients(model)
        norms.append(optimizer.update(1.0))
        moved = [values(model)[name] - before[name] for name in before]
        norms.append(math.sqrt(sum(float(change.double().square().sum()) for change in moved)) * 100 / 0.01)
    assert norms[0] == norms[2], "the norm that is told is the one before clipping"
    assert norms[1] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = Tiny()
    optimizer = ModelOptimizer(model, settings())
    set_gradients(model)
    assert model.hidden.bias.grad is not None
    model.hidden.bias.grad[0] = bad
    before = values(model)
    with pytest.raises(NonFiniteGradientError, match="norm is"):
        optimizer.update(1.0)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert all(not group for group in optimizer.state()[0]["state"].values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_optimizer_goes_on_bit_for_bit(name: str) -> None:
    undisturbed = Tiny()
    optimizer = ModelOptimizer(undisturbed, settings(name=name, weight_decay=0.1))
    for round_ in range(2):
        set_gradients(undisturbed, round_)
        optimizer.update(1.0)
    resumed = Tiny()
    resumed.load_state_dict(undisturbed.state_dict())
    other = ModelOptimizer(resumed, settings(name=name, weight_decay=0.1))
    other.restore(copy.deepcopy(optimizer.state()))
    for round_ in range(2, 5):
        for model, its in ((undisturbed, optimizer), (resumed, other)):
            set_gradients(model, round_)
            its.update(0.7)
    assert all(torch.equal(value, values(undisturbed)[key]) for key, value in values(resumed).items())


def test_the_state_of_another_optimizer_is_refused() -> None:
    adamw = ModelOptimizer(Tiny(), settings())
    with pytest.raises(ValueError, match="another optimizer"):
        ModelOptimizer(Tiny(), settings(name="muon")).restore(adamw.state())


def factors(total: int, **given: Any) -> list[float]:
    return [schedule_factor(settings(**given), step, total) for step in range(1, total + 1)]


def test_the_warm_up_rises_linearly_and_its_end_is_the_peak() -> None:
    assert factors(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_and_cosine_fall_towards_the_final_ratio() -> None:
    assert factors(5, schedule="linear", final_ratio=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert factors(4, schedule="cosine", final_ratio=0.0) == pytest.approx([1.0, 0.853553, 0.5, 0.146447], rel=1e-5)
    assert schedule_factor(settings(schedule="linear", final_ratio=0.1), 99, 10) == pytest.approx(0.1)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.floats(0, 1),
    st.integers(1, 60),
)
def test_a_schedule_is_positive_and_never_above_the_peak(name: Any, warmup: int, final: float, total: int) -> None:
    course = factors(total, schedule=name, warmup_steps=warmup, final_ratio=final)
    assert all(0 < factor <= 1 for factor in course)
    assert course[warmup:] == sorted(course[warmup:], reverse=True)
