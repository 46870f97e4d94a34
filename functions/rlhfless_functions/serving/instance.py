"""Start one function instance in this process: a pod's container, or a child of the local fork server."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from pydantic import BaseModel

from rlhfless_functions.api import Preload, Stage
from rlhfless_functions.runtime import logs
from rlhfless_functions.serving.caches import keep_caches
from rlhfless_functions.serving.function import Function, Instance
from rlhfless_functions.serving.preload import read_pointer
from rlhfless_functions.serving.server import serve
from rlhfless_functions.settings import EngineSettings
from rlhfless_functions.settings.emulation import EmulationSettings

logger = logging.getLogger(__name__)


class InstanceOptions(BaseModel):
    """The options of a new instance. A pod gets them as RLHFLESS_* variables, a local process as JSON."""

    stage: Stage
    name: str
    token: str
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    """Threads of torch's CPU operators."""
    preload: Preload | None = None
    """The model to load before the instance is ready."""
    emulation: EmulationSettings | None = None
    """The GPU to emulate, in a rehearsal."""
    gpus: list[str] | None = None
    """The GPUs to use, by their names in CUDA_VISIBLE_DEVICES; none if empty, all if omitted."""
    cache: str | None = None
    """Folder for instances' downloads and compiled code; by default each library's own."""
    started_at: float
    """Unix time of the request for the instance, from which its cold start counts."""


def create_function(stage: Stage, engine: EngineSettings | None = None, *, host: str = "127.0.0.1") -> Function:
    """Create a stage's code. Imports are this process's largest cost, so only this stage's are made.

    Args:
        host: address that the instance listens on.
    """
    if stage == "generation":
        from rlhfless_functions.environments.making import EpisodeMaker
        from rlhfless_functions.generation.stage import Generator

        return Generator(settings=engine, episodes_of=EpisodeMaker())
    if stage == "preparation":
        from rlhfless_functions.preparation.stage import Preparer

        return Preparer()
    from rlhfless_functions.learning.learner import Learner

    return Learner(host=host)


def run_instance(options: InstanceOptions, on_listening: Callable[[int], None]) -> None:
    """Serve until SIGTERM."""
    logs.configure(instance=options.name)
    if options.cache is not None:
        keep_caches(options.cache, os.environ)
    if options.gpus is not None:
        # It applies as long as nothing has asked the driver for its devices.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(options.gpus)
        logger.info("instance has GPUs of its own", extra={"fields": {"gpus": options.gpus}})
    if options.emulation is None:
        # Thousands of modules are imported, and none becomes garbage. Looking for garbage takes a sixth of the start.
        gc.disable()
        function = _compute(options)
        gc.freeze()
        gc.enable()
    else:
        function, on_listening = _emulate(options, options.emulation, on_listening)
    instance = Instance(options.stage, function, name=options.name, started_at=options.started_at, token=options.token)
    asyncio.run(
        serve(
            instance,
            host=options.host,
            port=options.port,
            token=options.token,
            preload=options.preload,
            on_listening=on_listening,
        )
    )


def _compute(options: InstanceOptions) -> Function:
    import torch

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    engine = options.preload.engine if options.preload is not None else None
    return create_function(options.stage, engine, host=options.host)


def _emulate(
    options: InstanceOptions, emulation: EmulationSettings, on_listening: Callable[[int], None]
) -> tuple[Function, Callable[[int], None]]:
    """Return the function, and the callback for when it listens, which waits until the emulated start is over."""
    from rlhfless_functions.serving.emulation import emulated_function

    starting = options.started_at + emulation.startup_seconds * emulation.time_scale - time.time()
    listens_at = time.monotonic() + max(0.0, starting)

    def listening(port: int) -> None:
        time.sleep(max(0.0, listens_at - time.monotonic()))
        on_listening(port)

    return emulated_function(options.stage, emulation, listens_at), listening


def main() -> None:
    """Run a container's instance: options come from RLHFLESS_STAGE, RLHFLESS_TOKEN, PORT and so on."""
    environment = os.environ
    values: dict[str, Any] = {
        "stage": environment["RLHFLESS_STAGE"],
        "name": environment.get("HOSTNAME", f"local-{os.getpid()}"),
        "token": environment["RLHFLESS_TOKEN"],
        "host": "0.0.0.0",
        "port": int(environment.get("PORT", "8080")),
        "threads": int(environment.get("RLHFLESS_THREADS", "1")),
        "cache": environment.get("RLHFLESS_CACHE") or None,
        "started_at": psutil.Process().create_time(),
    }
    if emulation := environment.get("RLHFLESS_EMULATION"):
        values["emulation"] = EmulationSettings.model_validate_json(emulation)
    if uri := environment.get("RLHFLESS_PRELOAD"):
        values["preload"] = read_pointer(uri)
    run_instance(InstanceOptions(**values), lambda port: print(f"listening on {port}", file=sys.stderr))


if __name__ == "__main__":
    main()
