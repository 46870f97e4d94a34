"""With `learning.compile` the layers are compiled; what is learnt is the same up to rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import AlgorithmSettings, BatchSettings, LearningSettings, LoraSettings, ModelSettings
from tests.learning.jobs import assert_equal, context, job_of
from tests.learning.steps import assert_same_gradients, learn_request, ragged_samples, take_step

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    """As in a process of its own."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many have been compiled."""
    return int(counters["stats"]["unique_graphs"])


def updates(folder: Path, compiled: bool, prompt: int = 90, **given: Any) -> Any:
    """A PPO update with prompts that pay to be shared."""
    samples = ragged_samples()
    for sample in samples:
        tokens = range(prompt + 5 * sample.prompt)
        sample.prompt_tokens = [2 + (sample.prompt + place * place) % 50 for place in tokens]
    request = learn_request(
        folder,
        algorithm=given.pop("algorithm", AlgorithmSettings(name="ppo", entropy_coefficient=0.01)),
        batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, microbatch_tokens=700),
        model=given.pop("model", ModelSettings(source=str(folder), dtype="float32")),
        learning=LearningSettings(compile=compiled, **given),
    )
    return take_step(request, samples)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "learning",
    [
        {},
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ({"gradient_checkpointing": True}, {"share_prompts": False}, {"pack": "never"})
        ),
    ],
    ids=["shared prompts", "checkpointing", "whole samples", "padded samples"],
)
def test_an_update_of_policy_and_critic_is_that_of_layers_that_are_not_compiled(
    tiny_model: Path, learning: dict[str, Any]
) -> None:
    state, report, (policy,), (critic,) = updates(tiny_model, True, **learning)
    assert graphs() > 0
    assert state.packed == (learning.get("pack") != "never")
    assert (report.shared_tokens > 0) == (learning in ({}, {"gradient_checkpointing": True}))
    _, _, (expected,), (of_critic,) = updates(tiny_model, False, **learning)
    assert_same_gradients(policy, expected, tolerance=3e-5)
    assert_same_gradients(critic, of_critic, tolerance=3e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_an_adapter_learns_the_same(tiny_model: Path) -> None:
    model = ModelSettings(source=str(tiny_model), dtype="float32", lora=LoraSettings(rank=2))
    given = {"model": model, "algorithm": AlgorithmSettings()}
    _, _, (compiled,), _ = updates(tiny_model, True, **given)
    assert graphs() > 0
    _, _, (plain,), _ = updates(tiny_model, False, **given)
    assert_same_gradients(compiled, plain, tolerance=3e-5)


def test_nothing_is_compiled_unless_asked_for(tiny_model: Path) -> None:
    updates(tiny_model, False)
    assert graphs() == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_layers_and_rows_of_any_length_share_what_is_compiled(tiny_model: Path) -> None:
    updates(tiny_model, True, algorithm=AlgorithmSettings())
    first = graphs()
    for prompt in (3, 40, 120):
        updates(tiny_model, True, prompt, algorithm=AlgorithmSettings())
    assert graphs() == first


def test_without_a_compiler_it_is_refused_before_anything_is_learnt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TaskError, match=r"learning\.compile: .* has no C\+\+ compiler") as caught:
        updates(tiny_model, True)
    assert caught.value.reason == "bad_request"
    updates(tiny_model, False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.nightly
def test_a_fresh_learner_gets_to_the_same_weights_bit_for_bit(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, learning=LearningSettings(compile=True))
    # Nothing that the first learner compiled is left: the second compiles with the rows that it sees first in mind.
    with inductor.patch(force_disable_caches=True):
        job.undisturbed(3)
        torch._dynamo.reset()
        Learner().run(job.request(3, "resumed", checkpoint_step=2), context())
    assert_equal(job.published(3, "resumed"), job.published(3))
