"""The process that forks episodes, from its parent's view."""

import time
from pathlib import Path

import psutil

from rlhfless_functions.environments.host import EpisodeHost
from tests.environments.chat import settings_of

ENVIRONMENT = """
class Env:
    def reset(self):
        return None

    def look(self) -> str:
        \"\"\"Look around.\"\"\"
        return "a wall"

    def get_reward(self):
        return 1.0
"""


def test_nothing_is_left_of_episodes_that_have_ended_though_none_begins_after_them(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(ENVIRONMENT)
    before = set(psutil.Process().children(recursive=True))
    host = EpisodeHost(settings_of(file))
    try:
        idle = set(psutil.Process().children(recursive=True)) - before
        for _ in range(5):
            episode = host.begin()
            episode.ask({"do": "begin", "seed": 0, "row": {}}, 60, 2**30)
            episode.close()
        until = time.monotonic() + 60
        while (left := set(psutil.Process().children(recursive=True)) - before - idle) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left
    finally:
        host.close()
