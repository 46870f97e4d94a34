"""The chart, installed as a platform engineer would."""

import json
import subprocess
from typing import Any

from harness.images import ROOT, Images
from harness.kubectl import Kubectl
from harness.storage import CLAIMS

_RELEASE = "rlhfless"


class Chart:
    """One release of the chart, in the namespace of its jobs.

    Args:
        kubectl: of that namespace.
    """

    def __init__(self, kubectl: Kubectl, images: Images) -> None:
        self._kubectl = kubectl
        self._images = images

    def install(self, **values: Any) -> None:
        """Install it, or upgrade it to other values, and wait until the operator is ready.

        Args:
            values: over those of these tests: these images, the claims of `Storage`, jobs of this namespace alone.
        """
        artifacts, files, _ = CLAIMS
        own = {
            "image": _named(self._images.operator),
            "functionsImage": _named(self._images.functions),
            "artifacts": {"existingClaim": artifacts},
            "files": {"existingClaim": files},
            "namespaces": [self._kubectl.namespace],
        }
        self._helm(
            *("upgrade", "--install", _RELEASE, str(ROOT / "charts" / "rlhfless"), "--values=-", "--wait"),
            # The CustomResourceDefinition outlives the release that made it, whose namespace is gone.
            "--take-ownership",
            f"--timeout={int(180 * self._kubectl.patience)}s",
            given=json.dumps(own | values),
        )

    def uninstall(self) -> None:
        """Uninstall it; the CustomResourceDefinition stays."""
        self._helm("uninstall", _RELEASE, "--ignore-not-found", "--wait")

    def _helm(self, *arguments: str, given: str = "") -> None:
        command = ["helm", "--namespace", self._kubectl.namespace, *arguments]
        result = subprocess.run(command, input=given, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"helm {arguments[0]}: {result.stderr.strip()}")


def _named(image: str) -> dict[str, str]:
    repository, _, tag = image.rpartition(":")
    return {"repository": repository, "tag": tag}
