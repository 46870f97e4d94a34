"""The models that preparation asks: the policy that generated, the frozen reference, the critic."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.model.trial import check_passes
from rlhfless_functions.runtime.device_memory import empty
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import CriticModel, load_critic, load_policy, swap_critic, swap_policy

logger = logging.getLogger(__name__)

Policy = PreTrainedModel | PeftModel


class PreparationModels:
    """Models in memory, on the accelerator if there is one, kept from request to request.

    A model at another version is swapped in place. With LoRA, the reference is the policy's own backbone with the
    adapter off, and the backbone is in memory only once.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: ModelSettings | None = None
        self._policy: tuple[WeightsReference, Policy] | None = None
        self._reference: tuple[WeightsReference, Policy] | None = None
        self._critic: tuple[WeightsReference, CriticModel] | None = None
        self.load_seconds = 0.0
        """Seconds spent so far on loading models and changing their weights."""

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Load the model that a first request probably needs: version 0 is the reference, any other the policy.

        Raises:
            TaskError: if it cannot be loaded.
        """
        self.use(model)
        if weights.version == 0 and model.lora is None:
            self._frozen(weights)
        else:
            self.policy(weights)

    def use(self, model: ModelSettings) -> None:
        """Set the model of the weights. A different model makes this forget everything."""
        if model != self._model:
            self._model = model
            self.forget()

    def forget(self) -> None:
        """Unload all models and free their memory. They are loaded again when needed."""
        for held in (self._policy, self._reference, self._critic):
            if held is not None:
                empty(held[1])
        self._policy = self._reference = self._critic = None

    def policy(self, weights: WeightsReference) -> Policy:
        """Return the policy at a version.

        Raises:
            TaskError: if it cannot be had; then no policy is kept.
        """
        held, self._policy = self._policy, None
        if held is None or held[0] != weights:
            with self._loads():
                # An adapter's backbone keeps the weights that it was loaded from. It goes before another one comes.
                if held is not None and isinstance(held[1], PeftModel) and held[0].uri != weights.uri:
                    held = None
                if held is None:
                    held = weights, self._loaded(weights)
                else:
                    swap_policy(held[1], weights)
                    held = weights, held[1]
        self._policy = held
        return held[1]

    @contextmanager
    def reference(self, weights: WeightsReference) -> Iterator[Policy]:
        """Give the frozen reference during the block.

        Raises:
            TaskError: if it cannot be had.
        """
        if self._settings.lora is None:
            yield self._frozen(weights)
            return
        held = self._policy
        policy = held[1] if held is not None and held[0].uri == weights.uri else self.policy(weights)
        with cast(PeftModel, policy).disable_adapter():
            yield policy

    def critic(self, weights: WeightsReference) -> CriticModel:
        """Return the value model at a version.

        Raises:
            TaskError: if it cannot be had; then no critic is kept.
        """
        held, self._critic = self._critic, None
        if held is None or held[0] != weights:
            with self._loads():
                if held is None:
                    critic = load_critic(self._settings, weights).requires_grad_(False).to(self.device)
                    held = weights, critic
                else:
                    swap_critic(held[1], weights)
                    held = weights, held[1]
        self._critic = held
        return held[1]

    def _frozen(self, weights: WeightsReference) -> Policy:
        if self._reference is None or self._reference[0] != weights:
            self._reference = None
            with self._loads():
                self._reference = weights, self._loaded(weights)
        return self._reference[1]

    @contextmanager
    def _loads(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.load_seconds += time.monotonic() - started

    @property
    def _settings(self) -> ModelSettings:
        assert self._model is not None, "use() comes first"
        return self._model

    def _loaded(self, weights: WeightsReference) -> Policy:
        started = time.monotonic()
        policy = load_policy(self._settings, weights)
        policy.requires_grad_(False)
        nn.Module.to(policy, self.device)
        seconds = {"weights": weights.uri, "weights_seconds": round(time.monotonic() - started, 4)}
        logger.info("model loaded", extra={"fields": seconds})
        check_passes(policy, weights.uri)
        return policy
