"""Text games, plain functions, and files that can't be used."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions.environments.host import EpisodeHost
from rlhfless_functions.environments.sessions import EnvironmentUnusableError
from rlhfless_functions.settings import EnvironmentSettings
from tests.environments.chat import Play, settings_of
from tests.environments.served_host import HostOnServer

TOOL = '''
def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number.
    """
    return 2 * number
'''


def _game(answer: str) -> str:
    return f"""
class Env:
    def reset(self, **row):
        self.seen = []
    def step(self, text):
        self.seen.append(text)
        over = len(self.seen) == 2
        return {answer}
"""


def _scored(score: str) -> str:
    return _game('("on", 0.0, True)') + f"    def get_reward(self):\n        return {score}"


@pytest.mark.parametrize(
    "answer",
    [
        '(f"heard {text}", 0.5, over)',
        '(f"heard {text}", 0.5, over, {})',
        '(f"heard {text}", 0.5, over, False, {})',
        '{"observations": [{"role": "user", "content": f"heard {text}"}], "reward": 0.5, "done": over}',
        '(None if over else f"heard {text}", 0.5, False)',
    ],
)
def test_a_game_hears_the_models_text_and_its_rewards_are_added_up(tmp_path: Path, answer: str) -> None:
    (tmp_path / "env.py").write_text(_game(answer))
    play = Play(settings_of(tmp_path / "env.py"))
    try:
        assert play.text(play.submit()) == "<|im_end|>\n<|im_start|>assistant\n"
        seen = play.say("north")
        assert play.text(seen) == "\n<|im_start|>user\nheard north<|im_end|>\n<|im_start|>assistant\n"
        outcome = play.say("south").outcome
        assert outcome is not None and (outcome.score, outcome.ended, outcome.turns) == (1.0, "finished", 2)
    finally:
        play.close()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (_game("7"), "returned int from step; return text"),
        (_game('("on", "much", over)'), "returned 'much' as a step's reward, not a number"),
        (_game("1 / 0"), "step: raised ZeroDivisionError"),
        (_scored("'good'"), "returned 'good' from get_reward, not a number"),
        (_scored("1e400"), "returned inf from get_reward, not a finite number"),
        (_scored("1 / 0"), "get_reward: raised ZeroDivisionError"),
    ],
)
def test_a_game_that_answers_nonsense_fails_the_episode_with_the_reason(
    tmp_path: Path, source: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "env.py").write_text(source)
    play = Play(settings_of(tmp_path / "env.py"))
    try:
        play.submit()
        outcome = play.say("north").outcome
        assert outcome is not None and (outcome.score, outcome.ended) == (0.0, "failed")
        assert told in caplog.text
    finally:
        play.close()


def test_tools_alone_leave_the_prompt_as_it_is_and_score_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TOOL)
    play = Play(EnvironmentSettings(tools=[f"{tmp_path / 't.py'}:double"]))
    try:
        assert not play.submit().tokens
        assert "\n8<|im_end|>" in play.text(play.call("double", '{"number": 4}'))
        outcome = play.say("8").outcome
        assert outcome is not None and outcome.score is None and not outcome.dropped
    finally:
        play.close()


def test_the_schema_comes_from_hints_and_docstring(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TOOL)
    host = EpisodeHost(EnvironmentSettings(tools=[f"{tmp_path / 't.py'}:double"]))
    host.close()
    (schema,) = host.schemas
    assert schema["function"]["parameters"]["properties"] == {
        "number": {"type": "integer", "description": "the number."}
    }


def _twice(folder: Path) -> EnvironmentSettings:
    (folder / "a.py").write_text(TOOL)
    (folder / "b.py").write_text(TOOL)
    return EnvironmentSettings(tools=[f"{folder / 'a.py'}:double", f"{folder / 'b.py'}:double"])


def _one(source: str) -> Callable[[Path], EnvironmentSettings]:
    def make(folder: Path) -> EnvironmentSettings:
        (folder / "env.py").write_text(source)
        return settings_of(folder / "env.py")

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_twice, "two tools named 'double'"),
        (_one("class Other: pass"), "has no class 'Env'; it has Other"),
        (_one("Env = 3"), "'Env' in .* is not a class"),
        (_one("class Env:\n    def reset(self): pass"), "has no tools and no step"),
        (_one("class Env:\n    def act(self, x): 'Act.'"), "tool 'act' has no schema"),
        (_one("raise RuntimeError('no display')"), "raised RuntimeError: no display"),
        (_one("import os\nos._exit(4)"), "ended its process with status 4"),
        (_one("class Env: ("), "SyntaxError"),
        (lambda folder: settings_of(folder / "gone.py"), "there is no file"),
    ],
)
def test_files_that_can_not_be_used_say_why(
    tmp_path: Path, make: Callable[[Path], EnvironmentSettings], message: str
) -> None:
    with pytest.raises(EnvironmentUnusableError, match=message):
        EpisodeHost(make(tmp_path))


def test_a_game_and_a_file_that_can_not_be_used_are_the_same_on_a_server(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(_game('(f"heard {text}", 0.5, over)'))
    settings = settings_of(tmp_path / "env.py")
    play = Play(settings, host=HostOnServer(settings))
    try:
        play.submit()
        assert "user\nheard  north <|im_end|>" in play.text(play.say(" north "))
        outcome = play.say("south").outcome
        assert outcome is not None and (outcome.score, outcome.ended) == (1.0, "finished")
    finally:
        play.close()
    with pytest.raises(EnvironmentUnusableError, match="has no class 'Env'; it has Other"):
        HostOnServer(_one("class Other: pass")(tmp_path))
