"""An operator in a process of its own, with emulated functions: for tests that kill it.

python -m tests.controller.operator_process ARTIFACTS TASK_SECONDS NAMESPACE [elect]
"""

import asyncio
import sys

from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.controller.logs import configure_logs
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from tests.clusters.emulated_functions import Emulation
from tests.controller.operator_harness import QUICK, emulated


def main(artifacts: str, task_seconds: str, namespace: str, elect: str = "") -> None:
    configure_logs("text")
    settings = ClusterSettings(
        functions_image="none", artifacts=artifacts, namespaces=(namespace,), metrics_port=0, liveness_port=0
    )
    election = Election(namespace, duration=3, renewal=2, retry=1) if elect else None
    emulation = Emulation(task_seconds=float(task_seconds), remember=False)
    asyncio.run(Operator(settings, emulated(emulation), election=election, pacing=QUICK).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
