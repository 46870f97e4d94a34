"""A folder in which batches are prepared, and what a test does there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rlhfless_functions.api import (
    Event,
    MaterializeRequest,
    MaterializeResult,
    PrepareRequest,
    PrepareResult,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.prompts import read_prompts
from rlhfless_functions.data.rollouts import GeneratedSample, PreparedSample, VersionSpan, read_prepared, write_rollouts
from rlhfless_functions.preparation.stage import Preparer
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import (
    AlgorithmSettings,
    DataSettings,
    ExactMatchReward,
    KlSettings,
    ModelSettings,
    RewardSettings,
    SamplingSettings,
)

EOS = 1
TEMPERATURE = 0.7
SAMPLING = SamplingSettings(temperature=TEMPERATURE, max_prompt_tokens=64, max_response_tokens=16)
RIGHT = RewardSettings(name="right", exact_match=ExactMatchReward())
KL = KlSettings(coefficient=0.1)


def make_context() -> TaskContext:
    def emit(event: Event) -> None:
        pass

    return TaskContext(emit=emit)


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    torch.set_num_threads(1)
    preparer = Preparer()
    yield preparer
    preparer._scorer.close()


class BatchFolder:
    """A folder with a materialised dataset, rollouts and room for what is prepared of them."""

    def __init__(self, folder: Path, model: Path, preparer: Preparer) -> None:
        self.folder = folder
        self.preparer = preparer
        self.model = ModelSettings(source=str(model), dtype="float32")
        self.initial = WeightsReference(version=0, uri=str(model))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.parts: list[str] = []
        self.tasks: list[SampleTask] = []

    def key(self) -> TaskKey:
        return TaskKey(job_uid="job", step=3, stage="preparation", part="0", attempt=0)

    def materialize(self, rows: list[dict[str, Any]], name: str = "prompts", **settings: Any) -> MaterializeResult:
        source = self.folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        request = MaterializeRequest(
            key=self.key(),
            result="",
            model=settings.pop("model", self.model),
            data=DataSettings(source=str(source)),
            sampling=settings.pop("sampling", SAMPLING),
            sink=str(self.folder / name),
        )
        result = self.preparer.run(request, make_context())
        assert isinstance(result, MaterializeResult)
        return result

    def generate(self, responses: dict[int, list[str]], finish: str = "stop") -> None:
        """Roll out responses, given as text; all but truncated ones end with EOS."""
        rollouts = []
        for prompt, texts in responses.items():
            tokens = read_prompts(str(self.folder / "prompts"), rows=[prompt])[0].tokens
            for index, text in enumerate(texts):
                ids = self.tokenizer(text)["input_ids"] + ([EOS] if finish == "stop" else [])
                rollouts.append(make_rollout(prompt, index, tokens, ids, finish))
        self.add(rollouts)

    def add(self, rollouts: list[GeneratedSample]) -> None:
        self.parts.append(str(self.folder / f"rollouts-{len(self.parts)}.parquet"))
        write_rollouts(self.parts[-1], rollouts)
        self.tasks += [SampleTask(prompt=rollout.prompt, index=rollout.index) for rollout in rollouts]

    def prepare(self, context: TaskContext | None = None, **changes: Any) -> tuple[PrepareResult, list[PreparedSample]]:
        fields: dict[str, Any] = {
            "key": self.key(),
            "result": "",
            "model": self.model,
            "prompts": str(self.folder / "prompts"),
            "rollouts": self.parts,
            "samples": self.tasks,
            "rewards": [RIGHT],
            "algorithm": AlgorithmSettings().resolved(),
            "sampling": SAMPLING,
            "policy": self.initial,
            "old_log_probs": False,
            "microbatch_tokens": 256,
            "sink": str(self.folder / "prepared.parquet"),
        }
        request = PrepareRequest(**{**fields, **changes})
        result = self.preparer.run(request, context or make_context())
        assert isinstance(result, PrepareResult)
        found = read_prepared([result.part])
        return result, [found[task.prompt, task.index] for task in request.samples]

    def failure(self, **changes: Any) -> TaskError:
        with pytest.raises(TaskError) as raised:
            self.prepare(**changes)
        assert not (self.folder / "prepared.parquet").exists()
        return raised.value


def make_rollout(prompt: int, index: int, tokens: list[int], ids: list[int], finish: Any = "stop") -> GeneratedSample:
    log_probs = [-0.5 - 0.01 * position for position in range(len(ids))]
    return GeneratedSample(prompt, index, tokens, ids, log_probs, finish, [VersionSpan(2, 0, len(ids))])


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, preparer: Preparer) -> BatchFolder:
    return BatchFolder(tmp_path, tiny_model, preparer)


@pytest.fixture
def two_groups(place: BatchFolder) -> BatchFolder:
    place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "the sum of 2 and 2 is", "answer": "4"}])
    place.generate({0: ["2", "3", "2 2 2"], 1: ["5", "4", "44444"]})
    return place
