"""Hostile programs as responses, in a restricted pod of the functions' image on the cluster's own kernel."""

from pathlib import Path
from typing import Any

from harness.by_hand import RESTRICTED
from harness.images import Images
from harness.kubectl import Kubectl

PROGRAMS = Path(__file__).parents[1] / "tests" / "rewards" / "code" / "test_hostile_programs.py"
POD = "hostile-programs"


def test_no_hostile_program_reaches_out_of_a_restricted_pods_worker(kubectl: Kubectl, images: Images) -> None:
    kubectl.apply(pod(images.functions))
    try:
        kubectl("wait", f"pod/{POD}", "--for=condition=Ready", f"--timeout={int(120 * kubectl.patience)}s")
        kubectl("exec", "--stdin", POD, "--", "sh", "-c", "cat > /tmp/test_programs.py", given=PROGRAMS.read_text())
        run = "cd /tmp && python -m pytest test_programs.py -q -x -p no:cacheprovider"
        said = kubectl("exec", POD, "--", "sh", "-c", f"{run} 2>&1 || {{ echo failed; uname -r; }}")
        print(said)
        assert " passed" in said and "failed" not in said, said[-4000:]
        # The pod's own processes are the only ones left.
        left = kubectl("exec", POD, "--", "sh", "-c", "cat /proc/[0-9]*/comm | sort | uniq -c")
        assert "python" not in left, left
        assert kubectl.get("pod", POD)["status"]["containerStatuses"][0]["restartCount"] == 0
    finally:
        kubectl("delete", "pod", POD, "--wait=false")


def pod(image: str) -> dict[str, Any]:
    """A pod with the restrictions of functions' own."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "function",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "env": [{"name": "HOME", "value": "/tmp"}],
                    "securityContext": RESTRICTED,
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    }
