"""Low-rank adapters in vLLM: the backbone stays loaded, and each request names the adapter of its weights version.

Adapters of several jobs can alternate on one backbone.
"""

from typing import Any

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings
from rlhfless_functions.weights.adapters import check_backbone
from rlhfless_functions.weights.source import unloadable, weights_folder

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can make room for; it pads a smaller rank."""
_SLOTS = 2
"""Number of adapter slots: one more than there are adapters at a time. If all slots are taken, vLLM may use the wrong
adapter for a request without one."""


def adapter_arguments(lora: LoraSettings) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a job that trains an adapter.

    Raises:
        TaskError: `bad_request` for a rank that is too large for vLLM.
    """
    return {"enable_lora": True, "max_loras": _SLOTS, "max_cpu_loras": _SLOTS, "max_lora_rank": _room(lora)}


def _room(lora: LoraSettings) -> int:
    """Return the smallest of vLLM's ranks that is large enough."""
    for rank in RANKS:
        if lora.rank <= rank:
            return rank
    raise TaskError(
        "bad_request",
        f"model.lora.rank ({lora.rank}) is more than vLLM's {RANKS[-1]}; lower it, or set generation.engine to"
        " transformers",
    )


class Adapters:
    """The adapter of the requests; at first none.

    Args:
        engine: vLLM's.
        backbone: fingerprint of the weights in vLLM.
        lora: the adapter settings that vLLM was started with.
    """

    def __init__(self, engine: Any, backbone: str, lora: LoraSettings) -> None:
        self._engine = engine
        self._backbone = backbone
        self._rank = _room(lora)
        self._loaded = 0
        self.request: Any = None
        """The adapter that a request names; None for the backbone alone."""

    def take(self, lora: LoraSettings | None) -> bool:
        """Return whether there is room for adapters with these settings. An adapter's folder has its scale and
        targets."""
        return lora is not None and lora.rank <= self._rank

    def use(self, weights: WeightsReference) -> None:
        """Load the version's adapter and forget the one before.

        Raises:
            TaskError: it can't be read or does not fit; there is then no adapter.
        """
        if self.request is not None:
            self._engine.remove_lora(self.request.lora_int_id)
            self.request = None
        if weights.adapter is None:
            return
        from vllm.lora.request import LoRARequest

        folder = weights_folder(weights.adapter)
        check_backbone(folder, weights.adapter, self._backbone)
        self._loaded += 1
        # vLLM identifies an adapter by its number and its name, so neither is ever used again.
        request = LoRARequest(f"version-{weights.version}-{self._loaded}", self._loaded, str(folder))
        with unloadable(weights.adapter, "give an adapter of the job's own model, rank and target modules"):
            if not self._engine.add_lora(request):
                raise ValueError("vLLM did not take it")
        self.request = request
