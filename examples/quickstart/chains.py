"""The quickstart's task: chains of additions and subtractions, worked out one step at a time.

A prompt is a fixed prefix (an instruction and one worked example), then a question such as `Q:28+3-3-9`; the wanted
response is a scratchpad and the result, `28+3=31;31-3=28;28-9=19;#19`. Everything here is plain Python with an explicit
random generator: the same seed gives the same data on every machine.
"""

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

PREFIX = "Step by step, then # and total.\nQ:52-6+9\nA:52-6=46;46+9=55;#55\n"
"""What all prompts begin with; a serving engine computes it once and keeps it."""

LOWEST, HIGHEST = 0, 99
LONGEST_CHAIN = 24

_SLIPS = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True)
class Chain:
    """A start value and the signed operands that are added to it, one after the other."""

    start: int
    operands: tuple[int, ...]

    @property
    def question(self) -> str:
        """The chain as it is written in a prompt: `28+3-3-9`."""
        return str(self.start) + "".join(f"{operand:+d}" for operand in self.operands)

    @property
    def result(self) -> int:
        """The value after the last operand."""
        return self.start + sum(self.operands)

    @property
    def prompt(self) -> str:
        """The whole prompt."""
        return f"{PREFIX}Q:{self.question}\nA:"


def draw_chain(generator: random.Random, longest: int = LONGEST_CHAIN) -> Chain:
    """A random chain whose running value stays within 0 and 99.

    The number of steps is log-normal with median 5 (and at most `longest`): like the responses of a real model, a few
    are many times longer than the rest.
    """
    steps = min(max(round(generator.lognormvariate(math.log(5), 0.6)), 1), longest)
    value = start = generator.randint(1, 60)
    operands = []
    for _ in range(steps):
        amount = generator.randint(1, 9)
        signs = [sign for sign in (-1, 1) if LOWEST <= value + sign * amount <= HIGHEST]
        operand = generator.choice(signs) * amount
        value += operand
        operands.append(operand)
    return Chain(start, tuple(operands))


def draw_chains(generator: random.Random, count: int, without: Collection[str] = ()) -> list[Chain]:
    """That many different chains, none of whose questions is in `without`."""
    chains: dict[str, Chain] = {}
    while len(chains) < count:
        chain = draw_chain(generator)
        if chain.question not in without:
            chains.setdefault(chain.question, chain)
    return list(chains.values())


def terse_response(chain: Chain) -> str:
    """Only the result, which a small model cannot work out in its head."""
    return f"#{chain.result}"


def worked_response(chain: Chain, generator: random.Random | None = None, slip: float = 0.0) -> str:
    """The scratchpad and the result.

    With probability `slip` a step goes wrong; half of the slips are noticed at once and corrected after a `?`
    (`28+3=33?31;`), the others are carried on to a wrong result. Without a generator nothing goes wrong.
    """
    value = chain.start
    parts = []
    for number, operand in enumerate(chain.operands):
        right = value + operand
        part = f"{value}{operand:+d}={right}"
        value = right
        if generator is not None and generator.random() < slip:
            wrong = right + generator.choice(_SLIPS)
            if _stays_in_range(wrong, chain.operands[number + 1 :]):
                carried_on = generator.random() < 0.5
                part = part[: part.index("=") + 1] + (str(wrong) if carried_on else f"{wrong}?{right}")
                value = wrong if carried_on else right
        parts.append(part)
    return ";".join([*parts, f"#{value}"])


def _stays_in_range(value: int, operands: tuple[int, ...]) -> bool:
    running = [value]
    for operand in operands:
        running.append(running[-1] + operand)
    return min(running) >= LOWEST and max(running) <= HIGHEST
