"""The choice of whether a job's actors share prefixes of prompts, with its reason (`generation.sharePrefixes`)."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.prefix_choice import CONNECTOR_SHARE, is_worth_sharing
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing

_NET = "prefix/net"
"""Name in the history of the expected gain of sharing in each step, less the cost of its connector."""
MEASURED = "prefix/gain"
"""Name in the history of the measured gain of each step that shared."""
UNABLE = "prefix/unable"
"""Name in the history of the note that the instances' engine shares nothing."""


class PrefixChoice:
    """The choice of one job.

    It is part of the checkpoint: the instances that a driver finds were started as the driver before it chose.

    Args:
        spec: the job's.
        actors: how many generation instances a step may use.
        history: of the job's steps.
    """

    def __init__(self, spec: RLHFJobSpec, actors: ActorRange, history: History) -> None:
        self._policy = spec.generation.share_prefixes
        self._obstacle = obstacle(spec, actors)
        self._history = history
        self._able: bool | None = None
        self._pays = True
        self._considered = 0
        self.reason = self._obstacle or "not considered yet"
        """Reason for sharing prefixes or for not sharing them."""

    @property
    def able(self) -> bool:
        """Whether instances are started with the means to share."""
        return self._policy == "always" or self._able is True

    def is_settled(self, step: int) -> bool:
        """Return whether there is nothing to consider before a step."""
        return self._obstacle is not None or step == self._considered

    def consider(
        self, step: int, sharing: PrefixSharing | None, *, generation_seconds: float, steps_left: int, restart: float
    ) -> str | None:
        """Choose before the instances of a step are requested, unless the choice is settled.

        Args:
            step: the step.
            sharing: the prefixes that its actors could share; None if no two prompts begin alike.
            generation_seconds: instance-seconds that its generation is expected to take.
            steps_left: steps of the job, this one included.
            restart: instance-seconds of starting its instances again.

        Returns:
            A note for people, if instances start again for it.
        """
        self._considered = step
        if self._history.recent(UNABLE):
            self.reason = "no: the engine of this job's instances shares none"
            return None
        if sharing is None:
            self.reason = "no: no two prompts begin with the same 128 tokens"
            return None
        measured = self._history.recent(MEASURED)
        # One step may have been slow because its instances were new.
        self._pays = len(measured) < 2 or fmean(measured) > 0
        gain, cost = (max(sharing.gain_seconds, 0.0) if self._pays else 0.0), CONNECTOR_SHARE * generation_seconds
        self._history.add(_NET, gain - cost)
        gains = self._history.recent(_NET)
        before, self._able = (
            self._able,
            is_worth_sharing(self._able, gains, steps_left=steps_left, change_seconds=restart),
        )
        found = (
            f"step {step} can save {sharing.gain_seconds:.2g} of {sharing.alone_seconds:.2g} instance-seconds of"
            f" prompts, and a connector takes {cost:.2g}"
        )
        if not self._pays:
            found = f"it has taken {-fmean(measured):.2g} instance-seconds a step more than it saved"
        self.reason = f"{'yes' if self._able and self._pays else 'no'}: {found}"
        if before is None or self._able == before:
            return None
        return f"instances start again {'to share prefixes' if self._able else 'without sharing prefixes'}: {found}"

    def used(self, sharing: PrefixSharing) -> bool:
        """Return whether a step's actors share the prefixes that they could."""
        if self._policy == "always":
            return True
        return self.able and self._pays and not self._history.recent(UNABLE) and sharing.gain_seconds > 0

    # --- keeping ---

    def state(self) -> dict[str, Any]:
        """Return all JSON values that `restore` needs."""
        return {"able": self._able}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._able = state["able"]


def obstacle(spec: RLHFJobSpec, actors: ActorRange) -> str | None:
    """Return why a job's actors can't or must not share prefixes, or why they must; None if it is to be found out."""
    generation = spec.generation
    if generation.share_prefixes != "auto":
        return f"{generation.share_prefixes}, by generation.sharePrefixes"
    if generation.engine == "transformers":
        return "no: only vLLM shares prefixes (generation.engine)"
    if spec.rehearsal is not None:
        return "no: emulated GPUs have no keys and values"
    if actors.most == 1:
        return "no: a step has one actor (generation.instances.max)"
    if generation.drafting != "never":
        return "no: vLLM drafts no tokens where it shares prefixes (generation.drafting)"
    if spec.asynchronous is not None:
        return "no: rollouts of an asynchronous job overlap"
    return None
