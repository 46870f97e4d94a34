"""What may be killed while a job runs."""

import subprocess

from harness.kubectl import Kubectl
from harness.options import Options


def kill(kubectl: Kubectl, options: Options, victim: str, name: str) -> None:
    """Without a warning, as a lost node does."""
    now = ("--grace-period=0", "--force", "--ignore-not-found", "--wait=false")
    match victim:
        case "operator":
            kubectl("delete", "pods", "--selector=app.kubernetes.io/instance=rlhfless", *now)
        case "activator":
            kubectl("--namespace=knative-serving", "delete", "pods", "--selector=app=activator", *now)
        case "api-server":
            assert options.kill_api_server is not None
            subprocess.run(options.kill_api_server, check=True)
        case "queue-proxy":
            assert options.kill_queue_proxies is not None
            subprocess.run(options.kill_queue_proxies, check=True)
        case stage:
            kubectl("delete", "pods", f"--selector=rlhfless.io/job={name},rlhfless.io/stage={stage}", *now)
