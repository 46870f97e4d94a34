"""An operator in a process of its own, with real functions as processes of this machine, that kills itself once at each
of some points of an asynchronous job.

python -m tests.controller.training_operator_process ARTIFACTS FILES NAMESPACE DEATHS.txt taken-2 learnt-3
"""

import asyncio
import sys
from pathlib import Path

from rlhfless_operator.controller.logs import configure_logs
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from tests.controller.operator_harness import QUICK
from tests.controller.test_training import local_functions
from tests.training.dying_ahead import die_at
from tests.training.dying_driver import Deaths


def main(artifacts: str, files: str, namespace: str, deaths: str, *points: str) -> None:
    die_at(points, Deaths(Path(deaths)))
    configure_logs("text")
    settings = ClusterSettings(
        functions_image="none",
        files=files,
        artifacts=artifacts,
        namespaces=(namespace,),
        metrics_port=0,
        liveness_port=0,
    )
    asyncio.run(Operator(settings, local_functions, pacing=QUICK).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
