"""The pause of decoding for a new version of the weights, prefetched and not, in turns.

    python benchmarks/weights/swap.py [--switches 20] [--threads 1] [--every 4] [--store local|s3]
                                      [--kv-cache recompute|keep] [--json FILE]

One instance with a model of 126 MB decodes a share of samples, and the driver's own code
(`training/stages/live_actors.py`) tells it to go on with each new version (`newWeights: switch`). A rollout has two
switches. The instance is told beforehand of every second version, and prefetches it. The pause is the
time from the end of the last decode step with the old weights to the beginning of the first one with the new weights,
without the prefill and the replay in between, which are listed beside it. On a busy machine much of it is waiting for a
core; the instance's processor time is listed, too. `--store s3` puts all artifacts into an S3 server on this machine
(moto). With `--kv-cache keep` responses go on with the keys and values of older weights, and nothing is replayed.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.random_models import publish_model, random_qwen3
from benchmarks.shared.s3_server import start_s3_server
from benchmarks.weights.one_instance import TOKEN, in_milliseconds, running_instance, tell, until_free

ROWS, PROMPTS, PROMPT, RESPONSE = 16, 64, 40, 200
INSTANCE = """
import json, sys, time

from rlhfless_functions.generation.engines.continuous_batch import ContinuousBatch
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.serving.instance import InstanceOptions, run_instance

log = open(sys.argv[2], "w", buffering=1)
spans = []

def timed(cls, name, label):
    plain = getattr(cls, name)

    def measured(self, *args, **kwargs):
        began, worked = time.monotonic(), time.process_time()
        try:
            return plain(self, *args, **kwargs)
        finally:
            spans.append((label, began, time.monotonic(), worked, time.process_time()))
            if label != "decode" and label != "admit":
                print(json.dumps(spans.copy()), file=log)
                spans.clear()

    setattr(cls, name, measured)

timed(ContinuousBatch, "_decode", "decode")
timed(ContinuousBatch, "_admit", "admit")
timed(TransformersEngine, "load", "load")
timed(TransformersEngine, "prefetch", "prefetch")
timed(TransformersEngine, "start", "start")
run_instance(InstanceOptions.model_validate_json(sys.argv[1]), lambda port: print(port, flush=True))
"""


def make_versions(folder: Path, count: int) -> list[Path]:
    """A model of 126 MB and as many later versions."""
    import torch

    model = random_qwen3()
    made = []
    for number in range(count + 1):
        made.append(folder / f"made-{number}")
        publish_model(made[-1], model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::7] *= 1.001
    return made


class Run:
    """One job's generation on one instance."""

    def __init__(self, made: list[Path], root: str, url: str, threads: int, *, keep: bool = False) -> None:
        from rlhfless_functions.api import WeightsReference

        self._made, self._root, self._url = made, root, url
        self.threads = threads
        self._keep = keep
        self.versions = [WeightsReference(version=0, uri=str(made[0]))]
        self.driver_pauses: list[float] = []
        self.ready: asyncio.Event | None = None

    def publish(self) -> None:
        """The next version is there, and written down."""
        from rlhfless_functions import artifacts

        reference = self.reference(len(self.versions))
        with artifacts.publish(reference.uri) as folder:
            for file in self._made[reference.version].iterdir():
                if file.name != artifacts.MANIFEST:
                    (folder / file.name).write_bytes(file.read_bytes())
        self.versions.append(reference)

    def reference(self, version: int) -> Any:
        """The version's reference, before it is there, too."""
        from rlhfless_functions.api import WeightsReference

        return WeightsReference(version=version, uri=f"{self._root}/weights/step-{version:06d}")

    async def generate(self, switches: int, every: float) -> None:
        """Decode until so many versions have been switched to."""
        from rlhfless_functions.api import (
            Event,
            GenerationRequest,
            NextWeights,
            Preload,
            SampleTask,
            TaskKey,
            WeightsReference,
        )
        from rlhfless_functions.settings import ModelSettings, SamplingSettings
        from rlhfless_operator.planner.moves.live_sizes import Batches
        from rlhfless_operator.platforms.stream import open_session, run_task
        from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
        from rlhfless_operator.training.actors.generated import GenerationOutcome
        from rlhfless_operator.training.actors.live_actor import Weights
        from rlhfless_operator.training.actors.live_rollout import LiveRollout, LiveSettings
        from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
        from rlhfless_operator.training.instances.instance_queue import InstanceQueue
        from rlhfless_operator.training.stages.live_actors import LiveActors

        model = ModelSettings(source=str(self._made[0]), dtype="float32")

        def upcoming(present: WeightsReference) -> list[NextWeights]:
            return [NextWeights(weights=self.reference(present.version + 1))] if present.version % 2 == 0 else []

        def make_request(attempt: ActorAttempt) -> GenerationRequest:
            return GenerationRequest(
                key=TaskKey(job_uid="u", step=99, stage="generation", part=attempt.actor, attempt=attempt.number),
                result=f"{attempt.sink}/result.json",
                model=model,
                weights=attempt.weights,
                oldest_version=0,
                keep_kv_cache=self._keep,
                next_weights=upcoming(attempt.weights),
                prompts=f"{self._root}/prompts.parquet",
                samples=attempt.samples,
                sampling=SamplingSettings(max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE),
                seed=0,
                sink=attempt.sink,
                resume_from=attempt.resume_from,
                known_until=attempt.known_until,
                kv_budget_tokens=ROWS * 256,
            )

        outcome = GenerationOutcome(sinks=[])
        url = self._url

        class Platform:
            async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
                try:
                    async with aclosing(run_task(session, url, TOKEN, request, stall_seconds=60)) as events:
                        async for event in events:
                            yield event
                finally:
                    # As the platforms do: the instance is free once it has published what it had.
                    await asyncio.shield(until_free(session, url))

        class Capacity:
            async def use(self, *_: object) -> None:
                pass

        async def consume(rollout: int, begun: WeightsReference) -> None:
            queue = InstanceQueue("generation", Capacity())  # type: ignore[arg-type]
            groups = [[SampleTask(prompt=prompt, index=index) for index in range(6)] for prompt in range(PROMPTS)]
            settings = LiveSettings(
                step=99,
                sink_root=f"{self._root}/rollouts/{rollout}",
                driver=1,
                retries=0,
                weights=SamplingWeights(begun, lambda: self.versions[-1]),
                make_request=make_request,
                on_event=lambda event: None,
            )
            weights = Weights(
                upcoming=upcoming,
                source=lambda present: NextWeights(weights=present),
                preload=lambda present: Preload(model=model, weights=present),
                on_use=lambda started, version, size: None,
            )
            live = LiveActors(Platform(), queue, weights, PROMPT)  # type: ignore[arg-type]
            pending = LiveRollout(groups, outcome, settings)
            try:
                async with live.generating(pending, Batches(1, ROWS, ROWS)):
                    while await pending.complete.get() is not None:
                        pass
            finally:
                await live.close()

        async with open_session() as session:
            for rollout in range(switches // 2):
                consuming = asyncio.create_task(consume(rollout, self.versions[-1]))
                await asyncio.sleep(every)
                for _ in range(2):
                    await asyncio.to_thread(self.publish)
                    await asyncio.sleep(every)
                if consuming.done():
                    await consuming
                    raise RuntimeError("the share was complete before the last version; set a smaller --every")
                consuming.cancel()
                await asyncio.gather(consuming, return_exceptions=True)
        self.driver_pauses = outcome.switch_pauses


class Span(NamedTuple):
    """Something that the instance did."""

    label: str
    began: float
    ended: float
    worked_before: float
    """Processor seconds of the process."""
    worked: float
    """The same at the end."""


def read_spans(log: Path) -> list[Span]:
    """What the instance did when, by its beginnings."""
    spans = [Span(*span) for line in log.read_text().splitlines() for span in json.loads(line)]
    return sorted(spans, key=lambda span: span.began)


def pauses(spans: list[Span]) -> list[dict[str, float]]:
    """Of each switch: the pause, what of it is loading, and the recomputing beside it, in seconds of the clock; and the
    instance's processor seconds in the pause."""
    found = []
    last: Span | None = None
    load: Span | None = None
    admitted = admitted_work = 0.0
    for span in spans:
        if span.label == "decode":
            if load is not None and last is not None:
                found.append(
                    {
                        "pause": span.began - last.ended - admitted,
                        "processor": span.worked_before - last.worked - admitted_work,
                        "load": load.ended - load.began,
                        "recompute": admitted,
                    }
                )
            last, load = span, None
            admitted = admitted_work = 0.0
        elif span.label == "load":
            load = span
        elif span.label == "admit" and load is not None:
            admitted += span.ended - span.began
            admitted_work += span.worked - span.worked_before
    return found


def decode_pace(spans: list[Span]) -> dict[str, float]:
    """Decode steps while a version is prefetched, against those in the two seconds before."""
    decodes = [span for span in spans if span.label == "decode"]
    prefetches = [span for span in spans if span.label == "prefetch"]
    ratios = []
    for each in prefetches:
        during = [span.ended - span.began for span in decodes if span.began < each.ended and span.ended > each.began]
        before = [
            span.ended - span.began for span in decodes if each.began - 2 < span.began and span.ended < each.began
        ]
        if during and before:
            ratios.append(statistics.mean(during) / statistics.mean(before))
    return {
        "prefetch_seconds_median": round(statistics.median(span.ended - span.began for span in prefetches), 4),
        "decode_step_ratio_while_prefetching_median": round(statistics.median(ratios), 3),
        "decode_step_seconds_median": round(statistics.median(span.ended - span.began for span in decodes), 4),
    }


def summary(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        name: in_milliseconds([each[name] for each in found]) for name in ("pause", "processor", "load", "recompute")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=20)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two versions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--kv-cache", choices=("recompute", "keep"), default="recompute")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    from rlhfless_functions.data.prompts import Prompt, write_prompts

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        root = str(folder / "run")
        if given.store == "s3":
            root, _ = start_s3_server()
        os.environ["RLHFLESS_CACHE"] = str(folder / "cache")
        numbers = random.Random(0)
        rows = [
            Prompt(row=row, tokens=[numbers.randrange(3, 60) for _ in range(PROMPT)], text="") for row in range(PROMPTS)
        ]
        write_prompts(f"{root}/prompts.parquet", rows)
        made = make_versions(folder, given.switches)
        version_bytes = sum(file.stat().st_size for file in made[0].glob("*.safetensors"))
        log = folder / "spans"
        with running_instance(INSTANCE, "generation", given.threads, log) as url:
            run = Run(made, root, url, given.threads, keep=given.kv_cache == "keep")
            asyncio.run(run.generate(given.switches, given.every))
        spans = read_spans(log)
    found = pauses(spans)
    # Each third one is between two rollouts, with the same weights.
    arms = {"prefetched": found[0::3], "not prefetched": found[1::3]}
    driver = {"prefetched": run.driver_pauses[0::2], "not prefetched": run.driver_pauses[1::2]}
    record = {
        "version_bytes": version_bytes,
        **{name: summary(values) for name, values in arms.items()},
        "driver_pause_median_ms": {
            name: round(1000 * statistics.median(values), 1) for name, values in driver.items() if values
        },
        "decoding": decode_pace(spans),
    }
    tell(record, given.json)


if __name__ == "__main__":
    main()
