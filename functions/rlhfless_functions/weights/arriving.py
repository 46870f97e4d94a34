"""A policy that can compute while its weights arrive: each layer waits for its own tensors alone.

The first load of a fresh instance reads tensors in the order in which a pass uses them, while the files are fetched. A
pass may run ahead of the files' checksums. Nothing that it computes may be used before `ArrivingPolicy.settle`.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.device_memory import empty
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights.arriving_files import ArrivingFiles
from rlhfless_functions.weights.policy import WEIGHTS_OF_CONFIG, build_empty, loaded_from, swap_policy, torch_dtype
from rlhfless_functions.weights.source import arriving_folder, read_config
from rlhfless_functions.weights.tensors import MismatchError, plan_of
from rlhfless_functions.weights.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


class NotArrivedError(Exception):
    """The tensors of a layer will not arrive, or the tensors that arrived can't be trusted."""


def load_arriving(model: ModelSettings, ref: WeightsReference, device: torch.device) -> "ArrivingPolicy | None":
    """Begin to load a policy; it can compute at once, and each layer waits for its tensors.

    Returns:
        None if the weights must be complete first, and `load_policy` must load them: adapters, weights that need a
        conversion, and unusual or faulty ones, whose error the ordinary load raises. The log says why.

    Raises:
        TaskError: the weights can't be had.
    """
    if model.lora is not None or ref.adapter is not None:
        return None
    try:
        with store_errors():
            return ArrivingPolicy(model, ref, arriving_folder(ref.uri, model), device)
    except Exception as error:
        if isinstance(error, TaskError) and isinstance(error.__cause__, artifacts.ArtifactError):
            raise
        logger.warning(
            "the layers of %s can't be used as they come, and it is loaded whole: %s: %s",
            ref.uri,
            type(error).__name__,
            str(error).strip().split("\n")[0],
        )
        return None


class ArrivingPolicy:
    """A policy that a thread fills with weights while they arrive.

    Args:
        model: the job's model, without adapter.
        ref: its weights.
        folder: the folder of the weights.
        device: device of the policy.

    Raises:
        Exception: the tensors are not the module's own, or the folder has another fault.
    """

    def __init__(
        self, model: ModelSettings, ref: WeightsReference, folder: artifacts.Arriving, device: torch.device
    ) -> None:
        self._model, self._ref, self._folder = model, ref, folder
        self._changed = threading.Condition()
        self._arrived: set[int] = set()
        self._problem: BaseException | None = None
        self._filling = threading.Lock()
        """Held while a tensor is written, so that nothing is written to an abandoned policy."""
        self._abandoned = False
        self.is_settled = False
        """Whether no weights are on their way any more."""
        self._unsound = False
        self.when_settled: Callable[[], None] | None = None
        """Called once all weights are there and checked. If it raises an error, the policy can't be used any more."""
        names = folder.names()
        if not names:
            raise MismatchError("the folder was not published, so its files are known only once they are complete")
        folder.wait_for("config.json")
        config = folder.read(lambda path: read_config(path, ref.uri))
        policy = build_empty(config, torch_dtype(model))
        if "generation_config.json" in names:
            folder.wait_for("generation_config.json")
            policy.generation_config = folder.read(GenerationConfig.from_pretrained)
        loaded_from(policy, model, ref.uri)
        self.policy: PreTrainedModel = policy.eval()
        nn.Module.to(self.policy, device)
        self._files = ArrivingFiles(folder)
        self._plan = plan_of(self.policy, self._shapes())
        awaited = {id(target) for target, _ in self._plan}
        self._awaited = list(_units(self.policy, awaited))
        if awaited != frozenset().union(*(ids for _, ids in self._awaited)):
            raise MismatchError("there are tensors that belong to no layer")
        self._passed: set[nn.Module] = set()
        self._hooks = [unit.register_forward_pre_hook(self._waiting(ids)) for unit, ids in self._awaited]
        self._thread = threading.Thread(target=self._fill, name="layers arrive", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the policy has no sound weights and never will."""
        return self._unsound or self._folder.failed

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the model's tokenizer. Its files come before the weights or beside them.

        Raises:
            TaskError: it cannot be had.
        """
        with store_errors():
            for name in self._folder.names():
                if not name.endswith(".safetensors"):
                    self._folder.wait_for(name)
            return self._folder.read(lambda path: load_tokenizer(self._model, self._ref, path))

    def settle(self, *, computed: bool = False) -> bool:
        """Wait until all weights are there and checked.

        Args:
            computed: whether a pass was computed meanwhile.

        Returns:
            Whether the numbers of this pass can be used; otherwise they must be computed anew.

        Raises:
            TaskError: the weights cannot be had; the policy can't be used any more.
        """
        if self.is_settled:
            return not computed
        self._unsound = True
        try:
            with store_errors():
                self._folder.result()
            self._thread.join()
        finally:
            self.is_settled = True
            for hook in self._hooks:
                hook.remove()
        problem = self._problem
        if problem is None and not self._folder.sound:
            problem = artifacts.BegunAgainError("a file was fetched again from its beginning")
        if problem is not None:
            logger.warning(
                "the layers of %s that came early are of no use, and it is loaded again: %s", self._ref.uri, problem
            )
            swap_policy(self.policy, self._ref, remedy=WEIGHTS_OF_CONFIG)
        if self.when_settled is not None:
            self.when_settled()
        self._unsound = False
        # A layer without a pass of its own may have been used by another layer before its tensors arrived.
        return problem is None and (not computed or all(unit in self._passed for unit, _ in self._awaited))

    def abandon(self) -> None:
        """Stop filling the policy, which is not needed any more, and give its memory back.

        A pass that waits for a layer ends with an error. No other pass may be under way.
        """
        with self._filling:
            self._unsound = self.is_settled = self._abandoned = True
        with self._changed:
            self._changed.notify_all()
        for hook in self._hooks:
            hook.remove()
        empty(self.policy)

    # --- the layers ---

    def _waiting(self, ids: frozenset[int]) -> Any:
        def wait(module: nn.Module, _: object) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._problem is not None or self._abandoned or ids <= self._arrived)
                if not ids <= self._arrived:
                    raise NotArrivedError(str(self._problem))
            self._passed.add(module)

        return wait

    # --- the files ---

    def _fill(self) -> None:
        try:
            with torch.no_grad():
                for target, name in self._plan:
                    content = self._files.read(name, tuple(target.shape))
                    with self._filling:
                        if self._abandoned:
                            return
                        target.copy_(content)
                    with self._changed:
                        self._arrived.add(id(target))
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._problem = error
                self._changed.notify_all()
        finally:
            self._files.close()

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return shapes by name. Those in files that have not arrived are compared later."""
        state = self.policy.state_dict(keep_vars=True)
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {}
        for name in self._files.file_of:
            if (shape := self._files.known_shape(name)) is None:
                shape = tuple(state[name].shape) if name in state else ()
            shapes[name] = (shape, True)
        return shapes


def _units(module: nn.Module, awaited: set[int]) -> Iterator[tuple[nn.Module, frozenset[int]]]:
    """Yield the parts of a model that wait as a whole, each with its tensors: its layers, which are the members of its
    lists, and other modules with tensors of their own."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, ids) for layer in child if (ids := _ids(layer) & awaited))
        elif any(True for _ in child.parameters(recurse=False)) or any(True for _ in child.buffers(recurse=False)):
            if ids := _ids(child) & awaited:
                yield child, ids
        else:
            yield from _units(child, awaited)


def _ids(module: nn.Module) -> frozenset[int]:
    return frozenset(id(tensor) for tensor in [*module.parameters(), *module.buffers()])
