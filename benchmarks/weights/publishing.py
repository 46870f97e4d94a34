"""The time that publishing a version of 126 MB holds the learner up, on a CPU.

    python benchmarks/weights/publishing.py [--steps 20] [--store local | s3] [--rate 50] [--samples 8] [--json FILE]

A learning instance in a process of its own takes one step after the other, as a driver asks for them over HTTP. Every
second step is published beside the next one, and the others before it: one run measures both ways. The learner's
process measures the time from the end of one step's training to the beginning of the next one's, and in it copying the
weights to the host's memory. Groups are always there. The driver's records of a step come on top, and are the same for
both. The store is a folder, or an S3 server behind a link of `--rate` MB/s.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.shared.links import Link
from benchmarks.shared.random_models import publish_model, random_qwen3
from benchmarks.shared.s3_server import start_s3_server
from benchmarks.weights.one_instance import TOKEN, in_milliseconds, running_instance, tell, until_free

PROMPT, RESPONSE = 40, 60
INSTANCE = """
import json, sys, time

from rlhfless_functions.learning import version_publisher as publisher
from rlhfless_functions.learning import learner
from rlhfless_functions.serving.instance import InstanceOptions, run_instance

log = open(sys.argv[2], "w", buffering=1)

def timed(module, name, step):
    plain = getattr(module, name)

    def measured(*given):
        began = time.monotonic()
        try:
            return plain(*given)
        finally:
            print(json.dumps([name, step(given), began, time.monotonic()]), file=log)

    setattr(module, name, measured)

timed(learner, "train_step", lambda given: given[3])
timed(learner, "publish", lambda given: given[1].version)
timed(publisher, "hold", lambda given: given[2].version)
run_instance(InstanceOptions.model_validate_json(sys.argv[1]), lambda port: print(port, flush=True))
"""


def write_batch(part: str, samples: int) -> None:
    """What every step learns from: groups of four samples."""
    from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan, write_prepared

    draw = random.Random(0)
    rows = [
        PreparedSample(
            prompt=number // 4,
            index=number % 4,
            prompt_tokens=[draw.randrange(3, 60) for _ in range(PROMPT)],
            response_tokens=[draw.randrange(3, 60) for _ in range(RESPONSE)],
            log_probs=[-4.0] * RESPONSE,
            finish_reason="stop",
            versions=[VersionSpan(0, 0, RESPONSE)],
            reward=float(number % 2),
            advantages=[1.0 - 2.0 * (number % 2)] * RESPONSE,
        )
        for number in range(samples)
    ]
    write_prepared(part, rows)


def request_of(step: int, model: Path, root: str, samples: int, *, beside: bool, unpublished: bool) -> Any:
    """A step's request."""
    from rlhfless_functions.api import (
        BatchReference,
        LearnRequest,
        SampleTask,
        TaskKey,
        UnpublishedVersion,
        WeightsReference,
    )
    from rlhfless_functions.settings import (
        AlgorithmSettings,
        BatchSettings,
        KlSettings,
        LearningSettings,
        ModelSettings,
        OptimizerSettings,
        SamplingSettings,
    )

    def weights(version: int) -> str:
        return f"{root}/weights/step-{version:06d}" if version else str(model)

    def batch(number: int) -> BatchReference:
        tasks = [SampleTask(prompt=each // 4, index=each % 4) for each in range(samples)]
        return BatchReference(step=number, parts=[f"{root}/batch.parquet"], samples=tasks)

    return LearnRequest(
        key=TaskKey(job_uid="u", step=step, stage="learning", part="learn", attempt=0),
        result=f"{root}/results/{step}.json",
        model=ModelSettings(source=str(model), dtype="float32"),
        initial=WeightsReference(version=0, uri=str(model)),
        base=WeightsReference(version=step - 1, uri=weights(step - 1)),
        batch=batch(step),
        replay=[batch(number) for number in range(1, step)],
        algorithm=AlgorithmSettings(kl=KlSettings(coefficient=0.0)).resolved(),
        optimizer=OptimizerSettings(learning_rate=1e-6),
        batch_settings=BatchSettings(prompts_per_step=samples // 4, samples_per_prompt=4),
        sampling=SamplingSettings(max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE),
        learning=LearningSettings(),
        total_steps=1000,
        seed=0,
        publish=weights(step),
        publish_beside=beside,
        unpublished=UnpublishedVersion(weights=weights(step - 1)) if unpublished else None,
    )


async def learn(url: str, model: Path, root: str, steps: int, samples: int) -> list[dict[str, float]]:
    """Take the steps, every second one published beside the next one; the metrics of each publication."""
    from rlhfless_functions.api import Done, Learnt, Published
    from rlhfless_operator.platforms.stream import open_session, run_task

    published, unpublished = [], False
    async with open_session() as session:
        for step in range(1, steps + 1):
            beside = step % 2 == 0 and step < steps
            request = request_of(step, model, root, samples, beside=beside, unpublished=unpublished)
            unpublished = False
            async with aclosing(run_task(session, url, TOKEN, request, stall_seconds=600)) as events:
                async for event in events:
                    if isinstance(event, Published):
                        published.append({"step": step - 1, **event.metrics})
                    if isinstance(event, Done):
                        published.append({"step": step, **event.result["metrics"]})
                    if isinstance(event, Learnt):
                        unpublished = True
                        break
            await until_free(session, url)
    return published


def summary(log: Path, published: list[dict[str, float]], steps: int) -> dict[str, Any]:
    """Times in milliseconds, of steps that are published beside the next one and of those that are not."""
    spans: dict[str, dict[int, tuple[float, float]]] = {"train_step": {}, "publish": {}, "hold": {}}
    for line in log.read_text().splitlines():
        name, step, began, ended = json.loads(line)
        spans[name][step] = (began, ended)
    train, hold = spans["train_step"], spans["hold"]
    # The first steps warm caches up.
    beside = [step for step in range(4, steps) if step % 2 == 0]
    before = [step for step in range(3, steps) if step % 2]
    gaps = {step: train[step + 1][0] - train[step][1] for step in range(1, steps)}
    copies = {step: ended - began for step, (began, ended) in hold.items()}
    publications = {int(each["step"]): each["seconds/publish"] for each in published if "seconds/publish" in each}
    lengths = {step: ended - began for step, (began, ended) in train.items()}
    with_beside, without = [gaps[step] for step in beside], [gaps[step] for step in before]
    copy = [copies[step] for step in beside]
    return {
        "held up, published beside the next step": in_milliseconds(with_beside),
        "held up, published before the next step": in_milliseconds(without),
        "copy to the host's memory": in_milliseconds(copy),
        "publication beside a step": in_milliseconds([publications[step] for step in beside]),
        "publication before the next step": in_milliseconds([publications[step] for step in before]),
        "training beside a publication": in_milliseconds([lengths[step + 1] for step in beside]),
        "training alone": in_milliseconds([lengths[step + 1] for step in before]),
        "of it neither copying nor publishing": {
            "published beside the next step": in_milliseconds([gaps[step] - copies[step] for step in beside]),
            "published before the next step": in_milliseconds([gaps[step] - publications[step] for step in before]),
        },
        "ratio_to_before": round(statistics.median(with_beside) / statistics.median(without), 4),
        "ratio_to_copy": round(statistics.median(with_beside) / statistics.median(copy), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8, help="samples of a step, a multiple of four")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s of the link to the S3 server")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        root = str(folder / "run")
        if given.store == "s3":
            root, address = start_s3_server()
            os.environ["AWS_ENDPOINT_URL"] = Link(address, given.rate * 1e6, uploads=True).address
        os.environ["RLHFLESS_CACHE"] = str(folder / "cache")
        publish_model(folder / "model", random_qwen3())
        write_batch(f"{root}/batch.parquet", given.samples)
        version_bytes = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        log = folder / "spans"
        with running_instance(INSTANCE, "learning", given.threads, log) as url:
            published = asyncio.run(learn(url, folder / "model", root, given.steps, given.samples))
        found = summary(log, published, given.steps)
    link = {"link_bytes_per_second": given.rate * 1e6} if given.store == "s3" else {}
    tell({"version_bytes": version_bytes, **link, **found}, given.json)


if __name__ == "__main__":
    main()
