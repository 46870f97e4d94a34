"""The local platform's fork server: it has imported everything, and forks an instance in milliseconds.

Importing torch and transformers takes seconds. A fork of a process that has imported them takes tens of milliseconds.
So a local instance can start when a stage needs it and end afterwards, like a function restored from a snapshot. The
fork server loads no model and starts no thread, because a fork would break them.

It reads one `InstanceOptions` a line from standard input, and reports on its children on standard output:

    {"event": "ready"} {"event": "listening", "name": ..., "pid": ..., "port": ...} {"event": "exited", "name": ...,
    "pid": ..., "status": ...}

At the end of its input it kills its children and exits.
"""

import gc
import json
import os
import selectors
import signal
import sys
import traceback
from typing import Any

from rlhfless_functions.runtime.processes import die_with_parent, name_process


def main() -> None:
    """Run until standard input ends."""
    die_with_parent(int(sys.argv[1]))
    reports = os.dup(1)
    os.dup2(2, 1)
    (_import_emulation if "--emulated" in sys.argv else _import_everything)()
    _keep()
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    children: dict[int, str] = {}
    _report(reports, event="ready")
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        try:
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if wake_read in ready:
                    os.read(wake_read, 4096)
                    _reap(children, reports)
                if 0 in ready:
                    chunk = os.read(0, 65536)
                    if not chunk:
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        _import_engine(json.loads(line))
                        pid = _fork(line, reports, inherited=(wake_read, wake_write))
                        children[pid] = json.loads(line)["name"]
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)


def _import_everything() -> None:
    import rlhfless_functions.generation.stage
    import rlhfless_functions.learning.learner
    import rlhfless_functions.preparation.stage
    import rlhfless_functions.serving.instance  # noqa: F401


def _import_engine(options: dict[str, Any]) -> None:
    """Import the engine of the instance, if that takes seconds: later instances find it imported."""
    emulated = options.get("emulation") is not None
    if options["stage"] != "generation" or emulated or not options.get("preload") or "vllm" in sys.modules:
        return
    from rlhfless_functions.api import Preload
    from rlhfless_functions.generation.engines.choice import preimport_engine

    preload = Preload.model_validate_json(json.dumps(options["preload"]))
    if preload.engine is None:
        return
    preimport_engine(preload.engine, preload.model)
    if "vllm" in sys.modules:
        _keep()


def _import_emulation() -> None:
    import rlhfless_functions.serving.emulation
    import rlhfless_functions.serving.instance  # noqa: F401


def _keep() -> None:
    """Keep the garbage collector from touching the present objects, which all instances share."""
    gc.collect()
    gc.freeze()


def _report(descriptor: int, **fields: Any) -> None:
    os.write(descriptor, json.dumps(fields).encode() + b"\n")


def _reap(children: dict[int, str], reports: int) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _report(reports, event="exited", name=children.pop(pid), pid=pid, status=os.waitstatus_to_exitcode(status))


def _fork(line: bytes, reports: int, inherited: tuple[int, ...]) -> int:
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(fork_server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in inherited:
            os.close(descriptor)
        from rlhfless_functions.serving.instance import InstanceOptions, run_instance

        options = InstanceOptions.model_validate_json(line)
        name_process(options.name)
        run_instance(
            options, lambda port: _report(reports, event="listening", name=options.name, pid=os.getpid(), port=port)
        )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
