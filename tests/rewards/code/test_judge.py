# ruff: noqa: E501 - the programs are easier to read beside their tests
"""The code under test and its judge: what tests may ask, and that nothing the code does makes a wrong answer pass."""

from collections.abc import Iterator

import pytest

from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.settings import CodeReward, RewardSettings, SamplingSettings


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer()
    yield scorer
    scorer.close()


def score(scorer: RewardScorer, tests: list[str], *programs: str) -> list[float | None]:
    completions = [f"```python\n{program}\n```" for program in programs]
    reward = RewardSettings(name="tests", code=CodeReward(timeout=5.0), memory=2**31)
    size = len(completions)
    group = RewardGroup(2, "q", None, completions, [[1]] * size, ["stop"] * size, {"tests": tests})
    return scorer.score([reward], [group], SamplingSettings()).totals[0]


FRAME_WALK = """
import os, sys
def double(x):
    frame = sys._getframe()
    while frame is not None:
        work = frame.f_locals.get("work") or frame.f_globals.get("work")
        for n in range(3, 64):
            try:
                word = work["word"] + " " if work else ""
                os.write(n, f"{word}passed 0\\n{word}passed 1\\n{word}end\\n".encode())
            except OSError:
                pass
        frame = frame.f_back
    os._exit(0)
"""
FRAMES_OF_EVERYTHING = """
import gc
def double(x):
    for thing in gc.get_objects():
        if isinstance(thing, (list, tuple)) and any(isinstance(s, str) and "assert double" in s for s in thing):
            return next(eval(s.split("==")[1]) for s in thing if f"double({x})" in s)
"""
MEMORY = """
import os, re
def double(x):
    found = set()
    for pid in [os.getpid(), os.getppid()] + [int(p) for p in os.listdir("/proc") if p.isdigit()]:
        try:
            if "python" not in open(f"/proc/{pid}/comm").read() or "judge" not in open(f"/proc/{pid}/cmdline").read():
                if pid != os.getppid():
                    continue
            for line in open(f"/proc/{pid}/maps"):
                span, mode = line.split()[:2]
                if "r" not in mode or pid == os.getpid():
                    continue
                start, end = (int(n, 16) for n in span.split("-"))
                with open(f"/proc/{pid}/mem", "rb") as memory:
                    memory.seek(start)
                    found |= set(re.findall(rb"assert double\\(%d\\) == (\\d+)" % x, memory.read(end - start)))
        except (OSError, ValueError, OverflowError):
            pass
    return int(found.pop()) if found else None
"""
PIPES = """
import os
for pid in os.listdir("/proc"):
    for n in range(3, 40):
        try:
            if pid.isdigit() and "pipe" in os.readlink(f"/proc/{pid}/fd/{n}") and "rewards/code/" in open(f"/proc/{pid}/cmdline").read():
                os.write(os.open(f"/proc/{pid}/fd/{n}", os.O_WRONLY), b"loaded\\npassed 0\\npassed 1\\nend\\n")
        except OSError:
            pass
def double(x): return None
"""
EQUAL = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 0
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __contains__(self, other): return True
    def __iter__(self): return iter([])
    def __class_getitem__(cls, item): return cls
def double(x): return Equal()
"""
PATCHED = """
import builtins, math
builtins.abs = builtins.round = lambda *a: 0
builtins.all = builtins.isinstance = lambda *a: True
math.isclose = lambda *a, **k: True
abs = round = lambda *a: 0
all = isinstance = isclose = lambda *a, **k: True
class AssertionError(Exception): pass
def double(x): return 17
"""
STOPPED = "def double(x): raise StopIteration"
TESTS = ["assert double(1) == 2", "assert double(3) == 6"]


@pytest.mark.parametrize(
    "program",
    [
        FRAME_WALK,
        FRAMES_OF_EVERYTHING,
        MEMORY,
        PIPES,
        *(EQUAL.format(base=base) for base in ("", "(int)", "(float)", "(str)", "(list)", "(dict)")),
        PATCHED,
        STOPPED,
    ],
)
def test_the_code_does_not_make_itself_pass(scorer: RewardScorer, program: str) -> None:
    tests = [
        *TESTS,
        "assert abs(double(2) - 4.0) < 1e-6",
        "import math\nassert math.isclose(double(2), 4.0)",
        "assert double(5) in [10]",
        "assert 10 == double(5)",
        "assert not double(5) != 10",
        "assert list(map(double, [1, 2])) == [2, 4]",
        "xs = [double(4), 3]\nassert xs == [8, 3]",
    ]
    # Nor does it make others pass that are judged at the same time.
    wrong = "def double(x): return 0"
    assert score(scorer, tests, program, wrong, wrong) == [0.0, 0.0, 0.0]


def test_nothing_of_a_test_is_in_the_codes_process_but_the_arguments(scorer: RewardScorer) -> None:
    program = """
import gc, sys
def seen():
    texts = [repr(t) for t in gc.get_objects() if isinstance(t, (list, tuple, dict)) and t is not globals()]
    return sum("-".join(["secret", "word"]) in text for text in texts)
"""
    assert score(scorer, ["assert seen() == 0 != 'secret-word'"], program) == [1.0]


COUNTER = """
class Counter:
    '''Counts.'''
    total = 0
    def __init__(self, start=0): self.count = start
    def add(self, n=1):
        self.count += n
        return self
    def __len__(self): return self.count
    def __eq__(self, other): return isinstance(other, Counter) and self.count == other.count
    def __add__(self, other): return Counter(self.count + other.count)
    def __iter__(self): return iter(range(self.count))
    def __getitem__(self, key): return key * 10
    def __enter__(self): return self
    def __exit__(self, *_): self.count = -1
    def __str__(self): return f'Counter({self.count})'
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (COUNTER, "c = Counter()\nc.add().add(2)\nassert c.count == 3 and len(c) == 3 and str(c) == 'Counter(3)'"),
        (COUNTER, "assert Counter(2) == Counter(2) and Counter(1) != Counter(2) and Counter(1) + Counter(2) == Counter(3)"),
        (COUNTER, "assert list(Counter(3)) == [0, 1, 2] and 2 in Counter(3) and 3 not in Counter(3)"),
        (COUNTER, "c = Counter()\nc.count = 5\nassert c[4] == 40 and c.count == 5 and Counter.__doc__ == 'Counts.'"),
        (COUNTER, "with Counter() as c: c.add()\nassert c.count == -1"),
        (COUNTER, "assert isinstance(Counter(), Counter) and not isinstance(3, Counter)"),
        ("def f(x): return x[::-1]", "assert f('abc') == 'cba' and f([1, 2]) == [2, 1] and f((1, 2)) == (2, 1)"),
        ("def f(): return {1: {'a', 2.5}, None: (True, b'x', 1j)}", "assert f() == {1: {2.5, 'a'}, None: (True, b'x', 1j)}"),
        ("def f(): return 10**5000", "assert f() == 10**5000 and isinstance(f(), int)"),
        ("def f(): return float('nan'), float('inf')", "a, b = f()\nassert a != a and b > 0"),
        ("def f(xs): xs.sort(); xs.append(9)", "xs = [3, 1]\nassert f(xs) is None and xs == [1, 3, 9]"),
        ("def f(d): d['x'] = 1", "d = {}\nf(d)\nassert d == {'x': 1}"),
        ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
        ("def f(g): return g(g(2))", "def twice(x): return h(x)\nh = lambda x: 2 * x\nassert f(twice) == 8"),
        ("def f(g):\n    try: g()\n    except ValueError as e: return str(e)", "def g(): raise ValueError('no')\nassert f(g) == 'no'"),
        ("def f(x):\n    if x < 0: raise ValueError('negative')", "try: f(-1)\nexcept ValueError as e: assert str(e) == 'negative'\nelse: assert False"),
        ("class Bad(KeyError): pass\ndef f(): raise Bad('k')", "try: f()\nexcept Bad: pass\nelse: assert False"),
        ("class Bad(KeyError): pass\ndef f(): raise Bad('k')", "import pytest\nwith pytest.raises(KeyError): f()"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6 and next(f(1)) == 0"),
        ("import math\nfrom math import sqrt", "assert math.isclose(sqrt(4), 2.0)"),
        ("def sum(a, b): return a - b", "assert sum(10, 4) == 6"),
        ("from collections import *\ndef f(): return Counter('aab'), deque([1]), OrderedDict(a=1)", "from collections import Counter, deque\nassert f() == (Counter(a=2, b=1), deque([1]), {'a': 1})"),
        ("from fractions import Fraction\nfrom decimal import Decimal\ndef f(): return Fraction(1, 2), Decimal('0.5')", "assert f() == (0.5, 0.5)"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2) and f().x == 1 and f() == P(1, 2)"),
        ("from enum import IntEnum\nclass C(IntEnum):\n    A = 1\ndef f(): return C.A", "assert f() == 1 and f() == C.A and f() + 1 == 2 and isinstance(f(), int)"),
        ("import datetime\ndef f(): return datetime.date(2020, 1, 2)", "import datetime\nassert f() == datetime.date(2020, 1, 2)"),
        ("import numpy as np\ndef f(x): return np.asarray(x) * 2", "import numpy as np\nassert (f([1, 2]) == np.array([2, 4])).all() and f([1])[0] == 2"),
        ("import numpy as np\ndef f(x): return np.int64(x), np.float64(x)", "assert f(3) == (3, 3.0)"),
        ("def f(x): return 2 * x", "def check(candidate):\n    assert candidate(2) == 4\n    assert all(candidate(i) == 2 * i for i in range(9))\ncheck(f)"),
        ("state = []\ndef f(x): state.append(x)", "f(1)\nf(2)\nassert state == [1, 2]"),
        ("f = lambda *a, **k: (a, k)", "assert f(1, b=2) == ((1,), {'b': 2})"),
        ("import re\ndef f(s): return re.match('a+', s)", "assert f('aab') and not f('b') and f('aab').group() == 'aa'"),
        ("def f(x): return 2 * x", "from solution import f as g\nassert g(2) == 4"),
        ("def f(x): return 2 * x", "import solution\nassert solution.f(2) == 4 and not hasattr(solution, 'missing')"),
        ("def f(x): return 2 * x", "from solution import *\nassert f(2) == 4"),
        ("def sum(a, b): return a - b", "from solution import sum\nassert sum(3, 1) == 2 and len([1]) == 1"),
        ("def f(x): return 2 * x", "def test_f():\n    from solution import f\n    assert f(2) == 4"),
        ("class Stack(list):\n    def top(self): return self[-1]", "from solution import Stack\ns = Stack()\ns.append(3)\nassert s.top() == 3"),
        ("def f(x):\n    if x: raise ValueError('no')", "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): cls.x = 1\n    def test_f(self):\n        with self.assertRaisesRegex(ValueError, 'no'): f(self.x)\n        self.assertIsNone(f(0))"),
        ("def f(x): return x", "class TestF:\n    def setup_method(self): self.x = 3\n    def test_f(self): assert f(self.x) == 3"),
        ("def f(x): return x", "async def test_f():\n    assert f(3) == 3"),
        ("def f(x): return x", "import pytest\n@pytest.mark.parametrize('x', [1, pytest.param(2, id='two')])\n@pytest.mark.parametrize(('y', 'z'), [(1, 1), (2, 2)])\ndef test_f(x, y, z):\n    assert f(x) == x and f(y) == z"),
        ("class A:\n    def f(self): return self\na = A()", "assert a.f() is not None and a.f() == a"),
    ],
)  # fmt: skip
def test_what_tests_ask_of_right_code_holds(scorer: RewardScorer, program: str, test: str) -> None:
    assert score(scorer, [test, test], program) == [1.0]


@pytest.mark.parametrize(
    "test",
    [
        "from solution import f, missing\nassert f(2) == 4",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(2), 5)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        with self.subTest(): self.assertEqual(f(2), 5)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.skipTest('later')\n        self.assertEqual(f(2), 4)",
        "import pytest\n@pytest.mark.parametrize('x', [2, 3])\ndef test_f(x):\n    assert f(x) == 4",
        "async def test_f():\n    assert f(3) == 3",
        "import pytest\ndef test_f():\n    with pytest.raises(ValueError): f(2)",
        "class TestF:\n    def setup_method(self): assert f(1) == 1\n    def test_f(self): assert f(2) == 4",
    ],
)
def test_a_test_in_any_form_fails_for_wrong_code(scorer: RewardScorer, test: str) -> None:
    assert score(scorer, [test], "def f(x): return 2 * x") == [0.0]


def test_a_process_of_the_code_that_ends_costs_its_test_alone(scorer: RewardScorer) -> None:
    program = "import os, signal\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: os.kill(os.getppid(), 9)\n    return x"
    assert score(scorer, [f"assert f({n}) == {n}" for n in range(5)], program) == [pytest.approx(3 / 5)]


def test_an_answer_that_is_forged_fails(scorer: RewardScorer) -> None:
    program = """
import os, pickle, struct
class Evil:
    def __reduce__(self): return (os.system, ("touch evil",))
def f(x):
    payload = pickle.dumps(("value", Evil(), ()))
    for n in range(3, 64):
        try: os.write(n, struct.pack("!Q", len(payload)) + payload)
        except OSError: pass
    return x
"""
    assert score(scorer, ["import os\nassert f(1) or True", "assert f(2) == 3"], program) == [0.0]
