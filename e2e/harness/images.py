"""The images under test: built from this checkout and brought to the cluster's nodes, or named by the options."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness.options import Options

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Images:
    """The two images' full names."""

    operator: str
    functions: str


def provide_images(options: Options, context: str) -> Images:
    """Build what has changed, and load it.

    Args:
        context: name of the kubeconfig's context, by which a cluster of kind's is known.

    Raises:
        RuntimeError: there is no way to load an image; the message names the variables that give one.
    """
    if options.images is not None:
        return Images(*options.images)
    load = options.load or _kind_load(context)
    if load is None:
        raise RuntimeError(
            "no way to load images into this cluster is known: set RLHFLESS_E2E_LOAD to a command that takes an"
            " archive, or RLHFLESS_E2E_OPERATOR_IMAGE and RLHFLESS_E2E_FUNCTIONS_IMAGE to images in a registry"
        )
    built = json.loads(subprocess.run([ROOT / "images" / "build"], check=True, stdout=subprocess.PIPE).stdout)
    for image in built.values():
        subprocess.run([*load, image["archive"]], check=True, stdout=subprocess.DEVNULL)
    return Images(built["operator"]["image"], built["functions"]["image"])


def _kind_load(context: str) -> tuple[str, ...] | None:
    if context.startswith("kind-") and shutil.which("kind"):
        return ("kind", "load", "image-archive", "--name", context.removeprefix("kind-"))
    return None
