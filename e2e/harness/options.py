"""What the end-to-end tests are told by RLHFLESS_E2E_* variables."""

import os
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The settings of one run of the tests."""

    load: tuple[str, ...] | None
    """RLHFLESS_E2E_LOAD: command that brings an image archive, its last argument, to the cluster's nodes. If left out,
    kind's own is used on a cluster that kind made."""
    images: tuple[str, str] | None
    """RLHFLESS_E2E_OPERATOR_IMAGE and RLHFLESS_E2E_FUNCTIONS_IMAGE: images that the nodes can pull, instead of those
    that are built and loaded."""
    vllm_image: str | None
    """RLHFLESS_E2E_VLLM_IMAGE: image of the functions with vLLM for CPUs that the nodes can pull; the one that is built
    and loaded if left out."""
    storage_class: str | None
    """RLHFLESS_E2E_STORAGE_CLASS: class of ReadWriteMany volumes; a folder of the only node if left out."""
    kill_api_server: tuple[str, ...] | None
    """RLHFLESS_E2E_KILL_API_SERVER: command that kills the API server without a warning, and starts another one. If
    left out, that is not tested."""
    kill_queue_proxies: tuple[str, ...] | None
    """RLHFLESS_E2E_KILL_QUEUE_PROXIES: command that kills the queue-proxy of every pod without a warning. If left out,
    that is not tested."""
    device_class: str | None
    """RLHFLESS_E2E_DEVICE_CLASS: a DeviceClass of the cluster, for pods that use GPUs in turns. If left out, that is
    not tested."""
    dra_driver: tuple[str, ...] | None
    """RLHFLESS_E2E_DRA_DRIVER: command that kills the DRA driver of these devices without a warning where `kill` is its
    last argument, and starts it again where that is `start`. If left out, that is not tested."""
    quickstart_steps: int | None
    """RLHFLESS_E2E_QUICKSTART_STEPS: so many steps of the quickstart, to save time; those of its file if left out."""
    keep: bool
    """RLHFLESS_E2E_KEEP: whether the namespace is left for a look at it."""
    patience: float
    """RLHFLESS_E2E_PATIENCE: factor of all time limits, for slow clusters."""

    @classmethod
    def from_environment(cls) -> "Options":
        """Read the variables."""
        load = os.environ.get("RLHFLESS_E2E_LOAD")
        kill_api_server = os.environ.get("RLHFLESS_E2E_KILL_API_SERVER")
        kill_queue_proxies = os.environ.get("RLHFLESS_E2E_KILL_QUEUE_PROXIES")
        dra_driver = os.environ.get("RLHFLESS_E2E_DRA_DRIVER")
        steps = os.environ.get("RLHFLESS_E2E_QUICKSTART_STEPS")
        images = (
            os.environ.get("RLHFLESS_E2E_OPERATOR_IMAGE", ""),
            os.environ.get("RLHFLESS_E2E_FUNCTIONS_IMAGE", ""),
        )
        return cls(
            load=tuple(shlex.split(load)) if load else None,
            images=images if all(images) else None,
            vllm_image=os.environ.get("RLHFLESS_E2E_VLLM_IMAGE") or None,
            storage_class=os.environ.get("RLHFLESS_E2E_STORAGE_CLASS") or None,
            kill_api_server=tuple(shlex.split(kill_api_server)) if kill_api_server else None,
            kill_queue_proxies=tuple(shlex.split(kill_queue_proxies)) if kill_queue_proxies else None,
            device_class=os.environ.get("RLHFLESS_E2E_DEVICE_CLASS") or None,
            dra_driver=tuple(shlex.split(dra_driver)) if dra_driver else None,
            quickstart_steps=int(steps) if steps else None,
            keep=bool(os.environ.get("RLHFLESS_E2E_KEEP")),
            patience=float(os.environ.get("RLHFLESS_E2E_PATIENCE", "1")),
        )
