"""`samples.jsonl`: responses of the policy for people to read, from before the first step to after the last."""

import json
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rlhfless_functions import artifacts
from rlhfless_functions.api import ExampleSample, SampleTask

When = Literal["before", "training", "after"]
Line = dict[str, Any]

_ORDER: dict[str, int] = {"before": 0, "training": 1, "after": 2}
_MOST_BYTES = 4 * 2**20
_EVALUATION_PROMPTS = 8
_MOST_OF_A_GROUP = 8


def evaluation_examples(prompts: Sequence[int]) -> frozenset[SampleTask]:
    """Return the samples to keep of an evaluation: the first of each of the first prompts, the same every time."""
    return frozenset(SampleTask(prompt=prompt, index=0) for prompt in prompts[:_EVALUATION_PROMPTS])


def training_examples(prompts: Sequence[int], groups: int, samples_per_prompt: int) -> frozenset[SampleTask]:
    """Return the samples to keep of a step: the first of the groups that were drawn first. The seed has shuffled
    them."""
    indices = range(min(samples_per_prompt, _MOST_OF_A_GROUP))
    return frozenset(SampleTask(prompt=prompt, index=index) for prompt in prompts[:groups] for index in indices)


def kept_examples(examples: Iterable[ExampleSample], batch: Sequence[SampleTask], groups: int) -> list[ExampleSample]:
    """Choose so many groups of a step's examples. Groups that are learnt from come first.

    Args:
        examples: of all rounds of the step, in any order; one may be there twice.
        batch: the samples that are learnt from, in their order.
        groups: number of groups.
    """
    by_key = {(example.row, example.index): example for example in examples}
    order = {row: place for place, row in enumerate(dict.fromkeys(sample.prompt for sample in batch))}
    rows = sorted({row for row, _ in by_key}, key=lambda row: (order.get(row, len(order)), row))[:groups]
    return [by_key[key] for row in rows for key in sorted(by_key) if key[0] == row]


class SamplesFile:
    """The file of samples, read and rewritten for each step.

    Object stores can't append, and an operator of a thousand jobs can't hold their texts. A step that is taken again
    replaces its own lines.

    Args:
        uri: of the file.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        # An evaluation may be written at the same time as the step before it.
        self._lock = threading.Lock()

    def put(self, when: When, step: int, samples: Sequence[ExampleSample]) -> None:
        """Write samples in place of earlier ones of the same evaluation or step.

        Raises:
            ArtifactError: the store can't be read or written.
        """
        if not samples:
            return
        with self._lock:
            kept = [line for line in _read(self._uri) if not _same(line, when, step)]
            lines = kept + [{"when": when, "step": step, **sample.model_dump()} for sample in samples]
            lines.sort(key=lambda line: (line.get("step", 0), _ORDER.get(line["when"], 1)))
            content = "".join(f"{json.dumps(line)}\n" for line in bounded(lines, _MOST_BYTES))
            artifacts.write_bytes(self._uri, content.encode())


def bounded(lines: list[Line], most: int) -> list[Line]:
    """Return lines of at most so many bytes.

    If there are more, every second training step is left out, then every second of the rest and so on. The first and
    the newest stay, and so do evaluations. The choice depends on the steps alone, not on how often a driver was killed.
    """
    steps = sorted({line["step"] for line in lines if line["when"] == "training"}) or [0]
    stride = 1
    while stride <= steps[-1] and sum(len(json.dumps(line)) + 1 for line in lines) > most:
        stride *= 2
        lines = [
            line
            for line in lines
            if line["when"] != "training" or line["step"] in (steps[0], steps[-1]) or line["step"] % stride == 0
        ]
    return lines


def _same(line: Line, when: When, step: int) -> bool:
    return line["when"] == when and (when != "training" or line.get("step") == step)


def _read(uri: str) -> list[Line]:
    """Return the lines that are there, without damaged ones."""
    lines: list[Line] = []
    if artifacts.exists(uri):
        for text in artifacts.read_bytes(uri, most=4 * _MOST_BYTES).splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and line.get("when") in _ORDER:
                lines.append(line)
    return lines
