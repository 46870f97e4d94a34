"""Weights in host memory ahead of their use: what is swapped in is what a load would have given, to the bit."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings, ModelSettings
from rlhfless_functions.weights import (
    load_policy,
    prefetch_policy,
    publish_adapter,
    publish_weights,
    swappable_bytes,
    take_over,
)
from rlhfless_functions.weights.fingerprints import fingerprint
from tests.weights.random_models import CONFIGS, logits, nudge, of_adapter, random_model, settings_of, version
from tests.weights.random_models import tiny as tiny  # A fixture.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_policy_takes_over_what_a_load_would_have_given(name: str, dtype: str, tmp_path: Path) -> None:
    folder, published = random_model(CONFIGS[name], tmp_path / "0"), str(tmp_path / "1")
    settings = settings_of(folder, dtype=dtype)
    policy = load_policy(settings, version(folder))
    before = {key: tensor.clone() for key, tensor in policy.state_dict().items()}
    other = load_policy(settings_of(folder), version(folder))
    nudge(other)
    publish_weights(published, other, None)
    alignment = {key: tensor.data_ptr() % 64 for key, tensor in policy.state_dict().items()}
    prefetched = prefetch_policy(policy, version(published, 1))
    assert all(torch.equal(tensor, before[key]) for key, tensor in policy.state_dict().items()), "it stays as it was"
    assert prefetched.is_of(policy, version(published, 1))
    take_over(prefetched)
    fresh = load_policy(settings, version(published, 1))
    mine, theirs = policy.state_dict(), fresh.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert torch.equal(tensor, theirs[key]), key
        assert tensor.dtype == theirs[key].dtype
        assert tensor.data_ptr() % 64 == alignment[key], "alignment changes what kernels compute"
    assert torch.equal(logits(policy), logits(fresh))
    assert len({id(each) for each in policy.parameters()}) == len({id(each) for each in fresh.parameters()})
    for number, model in enumerate((policy, fresh)):
        publish_weights(str(tmp_path / f"again-{number}"), model, None)
    assert fingerprint(tmp_path / "again-0") == fingerprint(tmp_path / "again-1")


def test_an_adapter_is_taken_over(tiny: ModelSettings, tmp_path: Path) -> None:
    adapted = tiny.model_copy(update={"lora": LoraSettings(rank=4, alpha=8)})
    policy, other = load_policy(adapted, version(tiny.source)), load_policy(adapted, version(tiny.source))
    nudge(other, of_adapter)
    publish_adapter(str(tmp_path / "1"), other)
    first = version(tiny.source, 1, tmp_path / "1")
    prefetched = prefetch_policy(policy, first)
    assert not torch.equal(logits(policy), logits(other))
    assert prefetched.is_of(policy, first)
    take_over(prefetched)
    assert torch.equal(logits(policy), logits(load_policy(adapted, first)))
    file = tmp_path / "1" / "adapter_model.safetensors"
    assert swappable_bytes(policy) == sum(tensor.nbytes for tensor in load_file(file).values())


def test_what_was_published_anew_since_is_not_taken_for_the_same(tiny: ModelSettings, tmp_path: Path) -> None:
    """A driver that is killed before it has written a version down makes it again."""
    policy, other = load_policy(tiny, version(tiny.source)), load_policy(tiny, version(tiny.source))
    uri = str(tmp_path / "1")
    publish_weights(uri, other, None)
    prefetched = prefetch_policy(policy, version(uri, 1))
    assert prefetched.is_of(policy, version(uri, 1))
    assert not prefetched.is_of(policy, version(uri, 2)) and not prefetched.is_of(other, version(uri, 1))
    shutil.rmtree(uri)
    assert not prefetched.is_of(policy, version(uri, 1))
    nudge(other)
    publish_weights(uri, other, None)
    assert not prefetched.is_of(policy, version(uri, 1))


def test_weights_that_do_not_fit_are_refused_and_the_policy_stays_as_it_was(tmp_path: Path) -> None:
    folder, other = random_model(CONFIGS["qwen2"], tmp_path / "0"), random_model(CONFIGS["llama"], tmp_path / "1")
    policy = load_policy(settings_of(folder), version(folder))
    before = logits(policy)
    with pytest.raises(TaskError, match=str(other)):
        prefetch_policy(policy, version(other, 1))
    (folder / "model.safetensors").rename(folder / "gone.safetensors")
    with pytest.raises(TaskError, match="cannot be loaded"):
        prefetch_policy(policy, version(folder, 2))
    assert torch.equal(logits(policy), before)
