"""A reward's file in the processes that the reward starts itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions.rewards.pool import RewardPool, WorkerSettings
from rlhfless_functions.rewards.source import SourceError, run_file
from tests.rewards.files import Reward, fate, make_group
from tests.rewards.files import reward as reward  # A fixture.

HEAD = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
@dataclass
class Case:
    text: str
def score(text):
    return float(len(text))
def score_case(case):
    return Case(case.text)
def start(queue, text):
    queue.put(score(text))
def reward(completions):
"""
USES = {
    "a spawned executor": """
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(score, completions))
""",
    "a spawned pool": """
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.map(score, completions)
""",
    "a forked pool": """
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(score, completions)
""",
    "a forked executor": """
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(score, completions))
""",
    "a fork server": """
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        return pool.map(score, completions)
""",
    "a spawned process": """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=start, args=(queue, text)) for text in completions]
    for process in processes:
        process.start()
    scores = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return sorted(scores)
""",
    "instances of its classes": """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [float(len(case.text)) for case in pool.map(score_case, map(Case, completions))]
""",
    "a manager": """
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict({text: score(text) for text in completions})
        return [shared[text] for text in completions]
""",
    "pickle in a program of its own": """
    import pickle, subprocess, sys
    program = "import pickle, sys; sys.path[:0] = eval(sys.argv[1]); print(pickle.load(sys.stdin.buffer)('abc'))"
    command = [sys.executable, "-c", program, repr(sys.path)]
    said = subprocess.run(command, input=pickle.dumps(score), capture_output=True, check=True)
    return [float(said.stdout) - 3 + len(text) for text in completions]
""",
    "threads": """
    from multiprocessing.pool import ThreadPool
    with ThreadPool(2) as pool:
        return pool.map(score, completions)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_reward_may_score_in_processes_of_its_own(reward: Callable[..., Reward], use: str) -> None:
    mine = reward(HEAD + USES[use], memory=4 * 2**30)
    assert fate(mine.score(make_group(0, "a", "bb"), seconds=250.0)[0]) == "[1.0, 2.0]"


def test_a_file_may_have_any_name_and_a_pool(tmp_path: Path) -> None:
    """A name of the standard library, or one that is no module's."""
    for name in ("statistics.py", "my-reward.v2.py"):
        mine = Reward(tmp_path / name, HEAD + USES["a spawned executor"], memory=4 * 2**30)
        try:
            assert fate(mine.score(make_group(0, "a", "bb"), seconds=250.0)[0]) == "[1.0, 2.0]"
        finally:
            mine.pool.close()


def test_joblib_finds_the_files_functions(reward: Callable[..., Reward]) -> None:
    pytest.importorskip("joblib")
    use = "    import joblib\n    return joblib.Parallel(2)(joblib.delayed(score)(text) for text in completions)\n"
    assert fate(reward(HEAD + use, memory=4 * 2**30).score(make_group(0, "a", "bb"), seconds=250.0)[0]) == "[1.0, 2.0]"


def test_a_file_from_a_store_has_pools_too(tmp_path: Path) -> None:
    setup = {
        "file": "memory://rewards/mine.py",
        "function": "reward",
        "style": None,
        "text": HEAD + USES["a spawned pool"],
    }
    pool = RewardPool(WorkerSettings("mine", "python", setup, 4 * 2**30))
    try:
        outcome = pool.score([make_group(0, "a", "bb")], seconds=lambda _: 250.0, give_up=True, stopped=lambda: False)
        assert fate(outcome[0]) == "[1.0, 2.0]"
    finally:
        pool.close()


def test_a_file_that_imports_from_its_package_is_refused_with_the_way_to_name_it(tmp_path: Path) -> None:
    package = tmp_path / "rival" / "rewards"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "accuracy.py").write_text("from ..imports import available\ndef reward(completions): ...\n")
    with pytest.raises(SourceError, match=r"accuracy.py imports .* `from rival\.rewards\.accuracy import"):
        run_file(str(package / "accuracy.py"), tmp_path, module_name="from_a_package")
