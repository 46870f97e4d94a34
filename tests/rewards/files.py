"""Reward files in pools of workers, and what becomes of groups there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.pool import Outcome, RewardPool, WorkerSettings

MEMORY = 512 * 2**20


def make_group(prompt: int, *completions: str) -> RewardGroup:
    responses = list(completions or ("a", "b"))
    return RewardGroup(
        prompt=prompt,
        text=f"question {prompt}",
        messages=None,
        completions=responses,
        completion_ids=[[1] for _ in responses],
        finish_reasons=["stop" for _ in responses],
        columns={},
    )


class Reward:
    """A reward file in a pool of one worker."""

    def __init__(self, path: Path, source: str, memory: int = MEMORY, size: int = 1) -> None:
        path.write_text(source)
        setup = {"file": str(path), "function": "reward", "style": "trl", "text": None}
        self.pool = RewardPool(WorkerSettings("mine", "python", setup, memory), size)

    def score(
        self,
        *groups: RewardGroup,
        seconds: float = 30.0,
        give_up: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        return self.pool.score(groups, seconds=lambda _: seconds, give_up=give_up, stopped=stopped)


@pytest.fixture
def reward(tmp_path: Path) -> Iterator[Callable[..., Reward]]:
    made: list[Reward] = []

    def make(source: str, **options: int) -> Reward:
        made.append(Reward(tmp_path / f"reward_{len(made)}.py", source, **options))
        return made[-1]

    yield make
    for each in made:
        each.pool.close()


def fate(outcome: Outcome) -> str:
    return outcome.error or str(outcome.scores)


# Each of these misbehaves only for prompt 1: the same call shows that the other prompts are not harmed.
MISBEHAVIOUR = """
import os, signal, sys, time
def write_to_all_descriptors():
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, b"x" * 100)
        except OSError:
            pass
def reward(prompts, completions):
    if prompts[0] == "question 1":
        {}
    return [1.0] * len(completions)
"""
