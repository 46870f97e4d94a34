"""An emulated Knative that runs beside a test, in a thread with an event loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rlhfless_operator.knative import KnativeClient
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.clusters.emulated_pods import emulated_pods
from tests.clusters.knative_definitions import api_client, install
from tests.clusters.knative_emulation import KnativeEmulation


@contextmanager
def knative_beside(server: ApiServer, emulation: Emulation) -> Iterator[KnativeEmulation]:
    """Knative on an API server, whose pods do what `emulation` says.

    What happens in its pods happens in the thread: what `emulation` calls must be safe there.
    """
    running: list[KnativeEmulation] = []
    ready, end = threading.Event(), threading.Event()

    async def run() -> None:
        async with api_client(server) as api:
            client = KnativeClient(api, field_manager="knative")
            await install(client)
            async with KnativeEmulation(client, launch=emulated_pods(emulation)) as knative:
                running.append(knative)
                ready.set()
                await asyncio.to_thread(end.wait)

    def thread() -> None:
        try:
            asyncio.run(run())
        finally:
            ready.set()

    running_thread = threading.Thread(target=thread, name="knative")
    running_thread.start()
    try:
        ready.wait()
        assert running, "Knative could not be emulated; see the thread's error"
        yield running[0]
    finally:
        end.set()
        running_thread.join()
