"""What a policy expects of the lengths of a step's responses: what it has learnt, or what it is told beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.migration import Key
from rlhfless_operator.simulator.instance import Response
from rlhfless_operator.simulator.policies import PolicySettings


class Foresight:
    """Expected lengths of one step, for its division and for its moves.

    Args:
        settings: of the policy; `told` says what it knows.
        responses: with their true lengths.
        estimates: what was learnt, by prompt.
        longest: tokens at which responses are truncated; whatever reaches them is a runaway.
    """

    def __init__(
        self,
        settings: PolicySettings,
        responses: Sequence[Response],
        estimates: Mapping[int, LengthEstimate],
        longest: int,
    ) -> None:
        self._settings, self._responses, self._longest = settings, responses, longest
        self._runs_away = {each.key for each in responses if each.length >= longest}
        if "runaways" in settings.told:
            estimates = {prompt: replace(each, runaways=0.0) for prompt, each in estimates.items()}
        self._estimates = estimates
        truth = {each.key: float(each.length) for each in responses}
        self._truth = truth if "migration" in settings.told else {}
        own = {key: estimates[key[0]].mean if key in self._runs_away else length for key, length in truth.items()}
        self._own = own if "ended" in settings.told else {}
        """What each would have if it ended by itself: of a runaway nobody knows."""

    @property
    def runaways(self) -> dict[int, float]:
        """By prompt, the share of its responses that may run away without having been foreseen."""
        surprise = "division" not in self._settings.told
        return {prompt: each.runaways if surprise else 0.0 for prompt, each in self._estimates.items()}

    def lengths(self) -> list[float]:
        """[responses] expected tokens of each, for the division."""
        if "division" in self._settings.told:
            return [float(each.length) for each in self._responses]
        if self._settings.planning != "optimal":
            return [self._estimates[each.prompt].mean for each in self._responses]
        groups: dict[int, list[Key]] = {}
        for each in self._responses:
            groups.setdefault(each.prompt, []).append(each.key)
        foreseen: dict[Key, float] = {}
        for prompt, keys in groups.items():
            if "runaways" in self._settings.told:
                told = [key for key in keys if key in self._runs_away]
            else:
                told = keys[: round(len(keys) * self._estimates[prompt].runaways)]
            foreseen.update(dict.fromkeys(told, float(self._longest)))
            others = [key for key in keys if key not in foreseen]
            learnt = self._estimates[prompt].quantiles(len(others))
            for key, length in zip(others, learnt, strict=True):
                foreseen[key] = min(float(self._longest), self._own.get(key, length))
        return [foreseen[each.key] for each in self._responses]

    def outlook(self, key: Key, tokens: int) -> tuple[float, float]:
        """Tokens that a response is expected to have to go still, and the chance that it is a runaway, for moves.

        Args:
            tokens: that it has.
        """
        if self._truth:
            return self._truth[key] - tokens, 0.0
        estimate = self._estimates[key[0]]
        if self._settings.planning != "optimal":
            # The rules of the others look at counts and contexts, not at what is expected.
            return max(0.0, estimate.mean - tokens), 0.0
        if "runaways" in self._settings.told and key in self._runs_away:
            return self._longest - tokens, 0.0
        if self._own:
            natural, most = self._own[key] - tokens, self._longest - tokens
            endless = estimate.runaways if natural > 0 else 1.0
            return max(0.0, natural) + endless * (most - max(0.0, natural)), endless
        return estimate.outlook(tokens, self._longest)
