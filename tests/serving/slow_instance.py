"""An instance in a process of its own, whose one task works until it is stopped and takes its time to publish.

python slow_instance.py TOKEN PUBLISHED; writes its port to standard output, and why it was stopped to PUBLISHED.
"""

import asyncio
import sys
import time
from pathlib import Path

from rlhfless_functions.api import ExportRequest, ExportResult, Message, Progress, WeightsReference
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.server import serve
from rlhfless_functions.settings import ModelSettings


class SlowToPublish:
    """Its function."""

    def __init__(self, published: Path) -> None:
        self._published = published

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        raise AssertionError("nothing is loaded")

    def sleep(self) -> None:
        raise AssertionError("nothing is held")

    def run(self, request: ExportRequest, context: TaskContext) -> Message:
        context.emit(Progress(finished=0, running=1, waiting=0, tokens=7))
        while context.stop_reason is None:
            time.sleep(0.002)
        reason = context.stop_reason
        time.sleep(1.0)
        self._published.write_text(reason)
        return ExportResult(uri=request.destination)


def main(token: str, published: str) -> None:
    instance = Instance("learning", SlowToPublish(Path(published)), name="pod-1", started_at=time.time())

    def tell(port: int) -> None:
        print(port, flush=True)

    asyncio.run(serve(instance, host="127.0.0.1", port=0, token=token, preload=None, on_listening=tell))


if __name__ == "__main__":
    main(*sys.argv[1:])
