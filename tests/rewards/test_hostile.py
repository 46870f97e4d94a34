"""Nothing that a policy can write ends a job: hostile responses to every built-in reward, through the real workers."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer, Scores
from rlhfless_functions.settings import (
    CodeReward,
    ExactMatchReward,
    FormatReward,
    LengthReward,
    MathReward,
    RewardSettings,
    SamplingSettings,
)

REWARDS = [
    RewardSettings(name="math", math=MathReward(timeout=1.0), memory=2**30),
    RewardSettings(name="format", format=FormatReward(pattern=r"(x+x+)+y", timeout=0.2), memory=2**29),
    RewardSettings(name="found", exact_match=ExactMatchReward(pattern=r"(?:a|a?)+$|(\d+)", timeout=0.2), memory=2**29),
    RewardSettings(name="same", exact_match=ExactMatchReward(), memory=2**29),
    RewardSettings(name="length", length=LengthReward(buffer_tokens=4)),
    RewardSettings(name="code", code=CodeReward(timeout=1.0), memory=2**30),
]
COLUMNS = {"ground_truth": "4", "tests": ["assert double(1) == 2", "assert double(3) == 6"]}
RIGHT = "```python\ndef double(x): return 2 * x\n```\n\\boxed{4}"


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer()
    yield scorer
    scorer.close()


def score(scorer: RewardScorer, *completions: str) -> Scores:
    size = len(completions)
    group = RewardGroup(0, "q", None, list(completions), [[1] * 4] * size, ["stop"] * size, COLUMNS)
    return scorer.score(REWARDS, [group], SamplingSettings(max_response_tokens=10))


def code(program: str) -> str:
    return f"```python\n{program}\n```"


HOSTILE = {
    "a tower of powers": r"\boxed{10^{10^{10}}}",
    "a taller one": r"$9^{9^{9^{9^{9}}}}$",
    "a factorial of a factorial": r"\boxed{((10!)!)!}",
    "a binomial": r"\boxed{\binom{10^{9}}{5 \cdot 10^{8}}}",
    "deep fractions": r"\boxed{" + r"\frac{1}{" * 3000 + "2" + "}" * 3000 + "}",
    "deep roots": "$" + r"\sqrt{" * 500 + "2" + "}" * 500 + "$",
    "deep brackets": r"\boxed{" + "(" * 20000 + "1" + ")" * 20000 + "}",
    "an open bracket": "$" + "(" * 5000,
    "an integral": r"\boxed{\int_0^{\infty} e^{-x^x} \sin(x^{x^x}) dx}",
    "a sum without end": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}}",
    "a large matrix": r"\boxed{\begin{pmatrix}" + r"1 & " * 3000 + r"\end{pmatrix}^{100}}",
    "a long number": r"\boxed{" + "9" * 200_000 + "}",
    "many boxes": r"\boxed{1}" * 5000,
    "megabytes": "a" * 3_000_000 + "b",
    "megabytes of digits": "1 " * 1_500_000,
    "a bomb for the format": "x" * 5000,
    "a bomb for the search": "a" * 5000 + "b",
    "control characters": "".join(map(chr, range(32))) * 100 + "\x7f\x80\x85\u2028\u202e",
    "NUL in code": code("a = '\0'"),
    "lone surrogates": "\ud800 \udfff " + code("a = '\udc80'"),
    "an open string": code("'" * 9999),
    "deep code": code("(" * 2000 + ")" * 2000),
    "a long expression": code("x = " + "+".join(["1"] * 100_000)),
    "code that sleeps": code("import time; time.sleep(1000)"),
    "code that forks": code("import os\nwhile True:\n    os.fork() or os._exit(0)"),
    "code that uses memory in children": code(
        "import os, time\nfor _ in range(12):\n"
        "    if os.fork() == 0:\n        x = bytearray(120 * 2**20); time.sleep(100)\ntime.sleep(100)"
    ),
    "code that kills its parents": code(
        "import os, signal\nfor pid in (os.getppid(),):\n    os.kill(pid, signal.SIGKILL)"
    ),
    "code that kills its group": code("import os, signal\nos.killpg(0, signal.SIGKILL)"),
    "code that stops": code("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    "code that writes bytes": code("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe' * 999)"),
    "code that removes its folder": code("import os, shutil\nshutil.rmtree(os.getcwd())"),
    "code that closes everything": code("import os\nos.closerange(0, 4096)"),
    "code that writes to everything": code(
        "import os\nfor n in range(3, 256):\n    try: os.write(n, b'\\xff' * 9999)\n    except OSError: pass"
    ),
    "code that floods": code("while True: print('x' * 10**6)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_response_harms_only_itself(scorer: RewardScorer, name: str) -> None:
    scores = score(scorer, RIGHT, HOSTILE[name], RIGHT)
    for reward in ("math", "code"):
        assert scores.terms[reward][0][::2] == [1.0, 1.0], (reward, scores.metrics)
    assert all(total is not None for total in scores.totals[0])


def test_what_was_given_up_is_counted(scorer: RewardScorer) -> None:
    scores = score(scorer, r"\boxed{10^{10^{10}}}", "x" * 5000, "a" * 5000 + "b", code("while True: pass"), RIGHT)
    assert scores.metrics["reward/math/timed_out/sum"] + scores.metrics["reward/math/crashed/sum"] == 1
    assert scores.metrics["reward/format/timed_out/sum"] >= 1
    assert scores.metrics["reward/found/timed_out/sum"] >= 1
    assert scores.metrics["reward/code/timed_out/sum"] == 1
    assert scores.metrics["reward/code/timed_out/count"] == 5


PIECES = st.sampled_from(
    [
        *(
            r"\boxed{",
            "}",
            "{",
            r"\frac",
            r"\sqrt",
            "^",
            "_",
            "$",
            "$$",
            r"\left(",
            r"\right)",
            r"\infty",
            r"\cdot",
            "!",
        ),
        *("10", "9999999", "0", "-", "/", "e", "i", "x", "=", ",", r"\{", r"\cup", r"\begin{matrix}", r"\end{matrix}"),
        *(
            "```python\n",
            "\n```",
            "def double(x):",
            "\n    ",
            "return ",
            "import os\n",
            "os._exit(0)",
            "(",
            ")",
            "lambda: ",
        ),
        *("\0", "\ud800", "\x1b[2J", "\u202e", "\r", "\N{FULLWIDTH DIGIT ONE}", "١", "½", "\U0001f600"),
    ]
)
hostile = st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=40).map("".join)


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(hostile, min_size=1, max_size=4))
def test_every_response_gets_a_score(scorer: RewardScorer, completions: list[str]) -> None:
    scores = score(scorer, *completions, RIGHT)
    for name, groups in scores.terms.items():
        assert all(number is not None and -1 <= number <= 1 for number in groups[0]), name
    assert (scores.terms["math"][0][-1], scores.terms["code"][0][-1]) == (1.0, 1.0)
