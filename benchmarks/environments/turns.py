"""Tokens that an actor samples a second in episodes of several turns, against responses of one turn.

    python benchmarks/environments/turns.py [--seconds 0 0.2 2 20] [--samples 1024] [--batch 32] [--turns 4]
        [--json FILE]

The engine is an emulated GPU; all else of an instance is real: the share, its conversations, and the storing of each
answer before the next turn samples from it. An environment answers after so many seconds with 16 tokens. Responses of
one turn have as many sampled tokens, and no answers. A rate counts the tokens until too few samples are left to fill
the batch while the others are with their environments: then the rate says how many samples there are, not how
turns are run.
"""

import argparse
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.api import Event, GenerationRequest, Progress, SampleTask, TaskKey, WeightsReference
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.data.traces import TraceLengths
from rlhfless_functions.environments.episodes import Observation, Outcome, Turn
from rlhfless_functions.generation.engines.emulated import EmulatedEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_functions.settings.emulation import EmulationSettings

GPU = {
    "step_seconds": 0.02,
    "sequence_seconds": 0.0002,
    "context_seconds": 2e-7,
    "prefill_token_seconds": 1e-4,
    "kv_tokens": 100_000,
}
"""A model of 7B on an L40S, roughly."""
PROMPT, TURN, ANSWER = 128, 64, 16
"""Tokens of a prompt, mean sampled tokens of a turn, and tokens of an answer."""
LONGEST = 4096


def turns_of(samples: int, turns: int) -> list[list[int]]:
    """Return the sampled tokens of each turn of each sample: from a quarter to seven quarters of the mean."""
    numbers = random.Random(0)
    return [[numbers.randint(TURN // 4, 7 * TURN // 4) for _ in range(turns)] for _ in range(samples)]


class NextTurns(TraceLengths):
    """Lengths of responses that end with each sample's present turn."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = [PROMPT] * len(turns)
        self.ends = [first for first, *_ in turns]

    def response_tokens(self, step: int, prompt: int, sample: int) -> int:
        """Return the end of the present turn in the response."""
        return self.ends[prompt]


class EngineOfTurns(EmulatedEngine):
    """An emulated GPU whose responses have these lengths."""

    def __init__(self, emulation: EmulationSettings, lengths: NextTurns) -> None:
        super().__init__(emulation)
        self._lengths = lengths


class Answers:
    """Environments that answer each turn after so many seconds."""

    def __init__(self, turns: Sequence[Sequence[int]], lengths: NextTurns, seconds: float) -> None:
        self._turns = turns
        self._lengths = lengths
        self._seconds = seconds
        self._had = [0] * len(turns)
        self._due: deque[tuple[float, Turn]] = deque()

    def submit(self, turn: Turn) -> None:
        """Take a turn."""
        # The beginning of an episode takes no time: the benchmark is of turns.
        self._due.append((time.monotonic() + (self._seconds if turn.response else 0.0), turn))
        if not turn.response:
            self._due.rotate(1)

    def ready(self, wait_seconds: float) -> list[Observation]:
        """Return the answers that are due."""
        until = time.monotonic() + wait_seconds
        while not self._due or self._due[0][0] > time.monotonic():
            if time.monotonic() >= until:
                return []
            time.sleep(min(0.005, wait_seconds))
        found = []
        while self._due and self._due[0][0] <= time.monotonic():
            found.append(self._answer(self._due.popleft()[1]))
        return found

    def _answer(self, turn: Turn) -> Observation:
        prompt, _ = turn.sample
        if not turn.response:
            return Observation(turn.sample)
        self._had[prompt] += 1
        had, turns = self._had[prompt], self._turns[prompt]
        if had == len(turns):
            return Observation(
                turn.sample, done=True, outcome=Outcome(1.0, had, "finished", seconds_away=self._seconds)
            )
        self._lengths.ends[prompt] = len(turn.response) + ANSWER + turns[had]
        return Observation(turn.sample, [2] * ANSWER)

    def close(self) -> None:
        """Do nothing: there is no process."""


def rate(folder: Path, turns: Sequence[Sequence[int]], batch: int, seconds: float | None) -> dict[str, Any]:
    """Run one request, and return the tokens sampled a second; without an environment if `seconds` is None."""
    whole = turns if seconds is not None else [[sum(each)] for each in turns]
    lengths = NextTurns(whole)
    emulation = EmulationSettings(trace="unused", prompts_per_step=len(turns), max_batch=batch, **GPU)
    episodes = Answers(whole, lengths, seconds) if seconds is not None else None
    name = "one-turn" if seconds is None else f"{seconds:g}"
    request = GenerationRequest(
        key=TaskKey(job_uid="turns", step=1, stage="generation", part=name, attempt=0),
        result=str(folder / f"{name}.json"),
        model=ModelSettings(source="unused"),
        weights=WeightsReference(version=0, uri="unused"),
        prompts=str(folder / "prompts.parquet"),
        samples=[SampleTask(prompt=prompt, index=0) for prompt in range(len(turns))],
        sampling=SamplingSettings(max_prompt_tokens=PROMPT, max_response_tokens=LONGEST),
        seed=1,
        sink=str(folder / name),
        progress_seconds=0.1,
    )
    seen: list[tuple[float, Progress]] = []

    def emit(event: Event) -> None:
        if isinstance(event, Progress):
            seen.append((time.monotonic(), event))

    generator = Generator(EngineOfTurns(emulation, lengths), episodes_of=lambda _: episodes)
    generator.run(request, TaskContext(emit=emit))
    began, first = next(each for each in seen if each[1].running == batch)
    # From half on, too few may be left.
    ended, last = next(each for each in seen if each[1].finished >= len(turns) / 2)
    full = [event.running for _, event in seen if first.tokens <= event.tokens <= last.tokens]
    return {
        "seconds_of_an_answer": seconds,
        "tokens_per_second": (last.tokens - first.tokens) / (ended - began),
        "mean_batch": sum(full) / len(full),
        "seconds": ended - began,
    }


def main() -> None:
    """Measure all rates, and print a row for each."""
    parser = argparse.ArgumentParser(description="Measure what turns cost an actor.")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0, 0.2, 2, 20], help="seconds of an answer")
    parser.add_argument("--samples", type=int, default=1024, help="samples of the actor")
    parser.add_argument("--batch", type=int, default=32, help="most sequences in a pass")
    parser.add_argument("--turns", type=int, default=4, help="turns of a sample")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    turns = turns_of(options.samples, options.turns)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prompts = [Prompt(row=row, tokens=[3] * PROMPT, text="") for row in range(options.samples)]
        write_prompts(str(folder / "prompts.parquet"), prompts)
        print("| An answer takes | Tokens a second | Of one turn | Mean batch |")
        print("|---|---|---|---|")
        for seconds in [None, *options.seconds]:
            row = rate(folder, turns, options.batch, seconds)
            row["ratio"] = row["tokens_per_second"] / (rows[0] if rows else row)["tokens_per_second"]
            rows.append(row)
            takes = "one turn" if seconds is None else f"{seconds:g} s"
            print(
                f"| {takes} | {row['tokens_per_second']:.0f} | {row['ratio']:.2f} | {row['mean_batch']:.1f} |",
                flush=True,
            )
    write_record({**described_run(()), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
