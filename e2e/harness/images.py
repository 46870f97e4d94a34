"""The images under test: built from this checkout and brought to the cluster's nodes, or named by the options."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.options import Options

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Images:
    """The two images' full names. The functions' has no vLLM: what it generates has the bits of a laptop."""

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
    return Images(*_built_and_loaded(("operator", "functions-slim"), options, context))


def provide_vllm_image(options: Options, context: str) -> str:
    """The same for the functions' image with vLLM for CPUs; its full name."""
    if options.vllm_image is not None:
        return options.vllm_image
    (image,) = _built_and_loaded(("functions-cpu",), options, context)
    return image


def _built_and_loaded(names: Sequence[str], options: Options, context: str) -> list[str]:
    load = options.load or _kind_load(context)
    if load is None:
        raise RuntimeError(
            "no way to load images into this cluster is known: set RLHFLESS_E2E_LOAD to a command that takes an"
            " archive, or RLHFLESS_E2E_OPERATOR_IMAGE, RLHFLESS_E2E_FUNCTIONS_IMAGE and RLHFLESS_E2E_VLLM_IMAGE to"
            " images in a registry"
        )
    built = json.loads(subprocess.run([ROOT / "images" / "build", *names], check=True, stdout=subprocess.PIPE).stdout)
    for name in names:
        subprocess.run([*load, built[name]["archive"]], check=True, stdout=subprocess.DEVNULL)
    return [built[name]["image"] for name in names]


def _kind_load(context: str) -> tuple[str, ...] | None:
    if context.startswith("kind-") and shutil.which("kind"):
        return ("kind", "load", "image-archive", "--name", context.removeprefix("kind-"))
    return None
