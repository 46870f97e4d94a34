"""Low-rank adapters in vLLM: the backbone stays, and the requests of a weights version name that version's adapter.

Which job a version is of makes no difference: adapters of several jobs take turns on one backbone.
"""

from pathlib import Path
from typing import Any

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings
from rlhfless_functions.weights.adapters import check_backbone
from rlhfless_functions.weights.source import unloadable, weights_folder

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has room for; a smaller rank is padded."""
_SLOTS = 2
"""One more than there are adapters at a time: with all slots taken, vLLM may give a request of the backbone alone the
wrong adapter."""


def adapter_arguments(lora: LoraSettings) -> dict[str, Any]:
    """Arguments of vLLM's engine for a job that trains an adapter.

    Raises:
        TaskError: `bad_request` for a rank that vLLM has no room for.
    """
    rank = _room(lora)
    if rank is None:
        raise TaskError(
            "bad_request",
            f"model.lora.rank ({lora.rank}) is more than vLLM's {RANKS[-1]}; lower it, or set generation.engine to"
            " transformers",
        )
    return {"enable_lora": True, "max_loras": _SLOTS, "max_cpu_loras": _SLOTS, "max_lora_rank": rank}


def _room(lora: LoraSettings) -> int | None:
    """The rank that vLLM makes room for."""
    return next((rank for rank in RANKS if lora.rank <= rank), None)


class Adapters:
    """The adapter that requests are generated with: none at first.

    Args:
        engine: vLLM's.
        backbone: fingerprint of the weights that it holds.
        lora: the adapter settings that it was started with.
    """

    def __init__(self, engine: Any, backbone: str, lora: LoraSettings) -> None:
        self._engine = engine
        self._backbone = backbone
        self._rank = _room(lora)
        self._loaded = 0
        self.request: Any = None
        """What a request names; None for the backbone alone."""

    def take(self, lora: LoraSettings | None) -> bool:
        """Whether there is room for adapters that are made so; their scale and targets are in their own folders."""
        return lora is not None and self._rank is not None and lora.rank <= self._rank

    def use(self, weights: WeightsReference) -> None:
        """Load the version's adapter and forget the one before.

        Raises:
            TaskError: if it cannot be had or does not fit; there is then no adapter.
        """
        self._forget()
        if weights.adapter is None:
            return
        folder = weights_folder(weights.adapter)
        check_backbone(folder, weights.adapter, self._backbone)
        self._loaded += 1
        request = self._request(weights, folder, self._loaded)
        with unloadable(weights.adapter, "give an adapter of the job's own model, rank and target modules"):
            if not self._engine.add_lora(request):
                raise ValueError("vLLM did not take it")
        self.request = request

    def _request(self, weights: WeightsReference, folder: Path, number: int) -> Any:
        from vllm.lora.request import LoRARequest

        # vLLM knows an adapter by its number and its name, which are therefore never used again.
        return LoRARequest(f"version-{weights.version}-{number}", number, str(folder))

    def _forget(self) -> None:
        if self.request is not None:
            self._engine.remove_lora(self.request.lora_int_id)
            self.request = None
