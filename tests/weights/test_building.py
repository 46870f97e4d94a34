"""Models that threads of a process build: one after the other, and torch's initialisers are its own afterwards."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.rewards.model import RewardModel
from rlhfless_functions.settings import LoraSettings, ModelSettings
from rlhfless_functions.weights import load_critic, load_policy


def load_adapted(folder: Path) -> object:
    model = ModelSettings(source=str(folder), dtype="float32", lora=LoraSettings(rank=2))
    return load_policy(model, WeightsReference(version=0, uri=str(folder)))


def load_plain(folder: Path) -> object:
    return load_policy(ModelSettings(source=str(folder), dtype="float32"), WeightsReference(version=0, uri=str(folder)))


def load_values(folder: Path) -> object:
    return load_critic(ModelSettings(source=str(folder), dtype="float32"), WeightsReference(version=0, uri=str(folder)))


def load_judge(folder: Path) -> object:
    judge = folder.parent / "judge"
    if not judge.exists():
        shutil.copytree(folder, judge, ignore=shutil.ignore_patterns("*.safetensors"))
        Qwen3ForSequenceClassification(Qwen3Config.from_pretrained(folder, num_labels=1)).save_pretrained(judge)
    return RewardModel(str(judge))


@pytest.mark.parametrize("load", [load_plain, load_adapted, load_values, load_judge])
def test_no_model_is_built_while_another_one_is(
    load: Callable[[Path], object], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    if load is load_judge:
        load_judge(folder)
    building, go_on = threading.Event(), threading.Event()
    build = AutoModelForCausalLM.from_config

    def build_slowly(*args: Any, **kwargs: Any) -> Any:
        if not building.is_set():
            building.set()
            assert go_on.wait(60)
        return build(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build_slowly)
    first = threading.Thread(target=load_plain, args=(folder,))
    first.start()
    assert building.wait(60)
    second = threading.Thread(target=load, args=(folder,))
    second.start()
    second.join(2)
    waited = second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert waited
    assert not torch.nn.init.zeros_(torch.ones(3)).any()


def test_a_fresh_critic_values_nothing_whatever_else_is_loaded_meanwhile(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    load_judge(folder)
    stop = threading.Event()

    def keep_loading() -> None:
        while not stop.is_set():
            load_plain(folder)

    others = [threading.Thread(target=keep_loading) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(20):
            critic = load_critic(
                ModelSettings(source=str(folder), dtype="float32"), WeightsReference(version=0, uri=str(folder))
            )
            assert not critic.score.weight.any()
            load_judge(folder)
    finally:
        stop.set()
        for other in others:
            other.join()
    assert not torch.nn.init.zeros_(torch.ones(3)).any()
