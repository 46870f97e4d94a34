"""The GPUs of local instances: no GPU is given away twice, and a new instance disturbs as few others as possible."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.platforms.local.gpus import GpuAccount, gpu_products, visible_gpus


def nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    """An environment whose nvidia-smi is a shell script."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    return {"PATH": str(folder)}


def test_the_driver_lists_the_gpus(tmp_path: Path) -> None:
    assert visible_gpus(nvidia_smi(tmp_path, 'printf "0\\n1\\n"')) == ("0", "1")


@pytest.mark.parametrize("script", ["echo 'No devices were found'; exit 6", "exit 9"])
def test_a_machine_whose_driver_lists_none_has_none(tmp_path: Path, script: str) -> None:
    assert visible_gpus(nvidia_smi(tmp_path, script)) == ()


def test_a_machine_without_the_driver_has_no_gpus(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path)}) == ()


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [("2,3", ("2", "3")), (" GPU-8932f937 , 1", ("GPU-8932f937", "1")), ("", ()), ("-1", ()), ("0,-1,2", ("0",))],
)
def test_what_the_user_lets_be_seen_counts(tmp_path: Path, variable: str, gpus: tuple[str, ...]) -> None:
    environment = nvidia_smi(tmp_path, 'printf "0\\n1\\n2\\n3\\n"')
    assert visible_gpus({**environment, "CUDA_VISIBLE_DEVICES": variable}) == gpus


def settle(account: GpuAccount, instance: str, stage: Stage) -> None:
    """Start an instance, for which there is room."""
    assert account.has_room(stage)
    home = account.home_of_fresh(stage)
    assert home is not None
    account.settle(instance, home)


def test_a_fresh_instance_goes_where_the_fewest_sleep() -> None:
    account = GpuAccount(["0", "1", "2"], {"generation": 1, "learning": 1})
    settle(account, "generation-1", "generation")
    settle(account, "generation-2", "generation")
    account.sleep("generation-1")
    settle(account, "learning-3", "learning")
    assert account.of("learning-3") == ("2",)
    account.sleep("generation-2")
    settle(account, "learning-4", "learning")
    assert account.of("learning-4") in [("0",), ("1",)]


def test_an_instance_wakes_on_the_gpus_that_it_began_with() -> None:
    account = GpuAccount(["0", "1"], {"generation": 1, "learning": 2})
    settle(account, "generation-1", "generation")
    account.sleep("generation-1")
    settle(account, "learning-2", "learning")
    assert not account.wake("generation-1")
    account.leave("learning-2")
    assert account.wake("generation-1")
    assert account.of("generation-1") == ("0",)
    assert not account.has_room("learning")


def test_a_fresh_instance_goes_to_free_gpus_then_to_those_that_are_given_back_then_to_those_without_work() -> None:
    account = GpuAccount(["0", "1", "2", "3"], {"generation": 1, "learning": 2})
    for number in (1, 2, 3):
        settle(account, f"generation-{number}", "generation")
    assert account.home_of_fresh("learning", idle=["generation-3", "generation-1"]) == ["3", "2"]
    assert account.home_of_fresh("learning", idle=["generation-3"], leaving=["generation-1"]) == ["3", "0"]
    assert account.home_of_fresh("learning") == ["3", "0"], "the first of those at work: it is named, and waited for"
    assert GpuAccount(["0"], {"learning": 2}).home_of_fresh("learning") is None


def test_without_gpus_there_is_room_for_everybody() -> None:
    account = GpuAccount([], {"generation": 4})
    assert not account.any
    settle(account, "generation-1", "generation")
    assert account.of("generation-1") == ()
    account.sleep("generation-1")
    assert account.wake("generation-1")


@given(
    gpus=st.integers(1, 6),
    per_instance=st.fixed_dictionaries({stage: st.integers(0, 3) for stage in STAGES}),
    moves=st.lists(st.tuples(st.sampled_from(["settle", "sleep", "wake", "leave"]), st.integers(0, 30)), max_size=60),
)
def test_no_gpu_is_ever_used_by_two(gpus: int, per_instance: dict[Stage, int], moves: list[tuple[str, int]]) -> None:
    names = [str(number) for number in range(gpus)]
    account = GpuAccount(names, per_instance)
    using: dict[str, tuple[str, ...]] = {}
    asleep: dict[str, tuple[str, ...]] = {}
    for number, (move, choice) in enumerate(moves):
        stage = STAGES[choice % 3]
        instance = f"{stage}-{number}"
        if move == "settle" and account.has_room(stage):
            settle(account, instance, stage)
            using[instance] = account.of(instance)
            assert len(using[instance]) == per_instance[stage]
        elif move == "sleep" and using:
            instance = sorted(using)[choice % len(using)]
            account.sleep(instance)
            asleep[instance] = using.pop(instance)
        elif move == "wake" and asleep:
            instance = sorted(asleep)[choice % len(asleep)]
            if account.wake(instance):
                assert account.of(instance) == asleep[instance]
                using[instance] = asleep.pop(instance)
        elif move == "leave" and using:
            instance = sorted(using)[choice % len(using)]
            account.leave(instance)
            del using[instance]
        used = [gpu for held in using.values() for gpu in held]
        assert len(used) == len(set(used))
        assert set(used) <= set(names)
        for stage in STAGES:
            assert account.has_room(stage) == (gpus - len(used) >= per_instance[stage])
            home = account.home_of_fresh(stage, sorted(using))
            assert (home is not None) == (gpus >= per_instance[stage])
            if home is not None:
                taken = len([gpu for gpu in home if gpu in used])
                assert taken == max(0, per_instance[stage] - (gpus - len(used))), "no more than have to are disturbed"


@pytest.mark.parametrize(
    ("gpus", "products"),
    [
        (("0", "1"), ("NVIDIA H100 80GB HBM3",)),
        (("1", "2"), ("NVIDIA H100 80GB HBM3", "NVIDIA L40S")),
        (("GPU-c",), ("NVIDIA L40S",)),
        (("7",), ()),
    ],
)
def test_the_driver_says_what_the_gpus_are(tmp_path: Path, gpus: tuple[str, ...], products: tuple[str, ...]) -> None:
    lines = ["0, GPU-aa, NVIDIA H100 80GB HBM3", "1, GPU-bb, NVIDIA H100 80GB HBM3", "2, GPU-cc, NVIDIA L40S"]
    environment = nvidia_smi(tmp_path, f"printf '%s\\n' {' '.join(map(repr, lines))}")
    assert gpu_products(gpus, environment) == products
