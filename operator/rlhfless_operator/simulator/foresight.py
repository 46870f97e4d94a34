"""The response lengths that a policy expects of a step: those that it has learnt, or that it is told beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhfless_operator.planner.acting import NO_ACTING, Acting
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.planner.step.generation import ExpectedSamples
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.simulator.instance import Response
from rlhfless_operator.simulator.policies import PolicySettings

LONG = 0.5
"""Share of the longest possible length from which a response counts as long."""


class Foresight:
    """Expected lengths of one step, for its division and for its moves.

    Args:
        settings: of the policy; `told` names the lengths that it knows.
        responses: with their true lengths.
        estimates: learnt estimates, by prompt.
        longest: tokens at which responses are truncated.
        acting: how samples of each prompt are expected to act; None without an environment.
    """

    def __init__(
        self,
        settings: PolicySettings,
        responses: Sequence[Response],
        estimates: Mapping[int, LengthEstimate],
        longest: int,
        acting: Mapping[int, Acting] | None = None,
    ) -> None:
        self._settings, self._responses, self._longest, self._acting = settings, responses, longest, acting or {}
        truth = {each.key: float(each.length) for each in responses}
        self._truth = truth if "migration" in settings.told else {}
        self._long: dict[Key, float] = {}
        self._short: dict[Key, float] = {}
        if "long" in settings.told:
            # A policy that knows all long responses knows that no other one is long.
            estimates = {prompt: replace(each, runaways=0.0) for prompt, each in estimates.items()}
            self._long = {key: length for key, length in truth.items() if length >= LONG * longest}
        if "short" in settings.told:
            # A long response is expected to have the usual length until it is longer.
            self._short = {
                key: length if length < LONG * longest else estimates[key[0]].mean for key, length in truth.items()
            }
        self._estimates = estimates

    @property
    def runaways(self) -> dict[int, float]:
        """Share of unforeseen runaways among each prompt's responses, by prompt."""
        surprise = "division" not in self._settings.told
        return {prompt: each.runaways if surprise else 0.0 for prompt, each in self._estimates.items()}

    def samples(self) -> ExpectedSamples:
        """Return the responses with the lengths that the plan expects."""
        loads = [self._load(each, tokens) for each, tokens in zip(self._responses, self.lengths(), strict=True)]
        seen = sum(each.seen > 0 for each in self._estimates.values())
        known = "division" in self._settings.told or 2 * seen >= len(self._estimates)
        return ExpectedSamples(loads, self.runaways, self._longest, known)

    def _load(self, response: Response, tokens: float) -> SampleLoad:
        acts = self._acting.get(response.prompt, NO_ACTING).times(
            tokens / max(1.0, self._estimates[response.prompt].mean)
        )
        if "division" in self._settings.told and response.episode is not None:
            acts = response.episode.acting
        context = response.prompt_tokens + round(acts.given_tokens)
        return SampleLoad(response.prompt, response.index, context, tokens, acts.away_seconds)

    def lengths(self) -> list[float]:
        """Return the expected tokens of each response, for the division [responses]."""
        if "division" in self._settings.told:
            return [float(each.length) for each in self._responses]
        if self._settings.planning != "optimal":
            return [self._estimates[each.prompt].mean for each in self._responses]
        groups: dict[int, list[Key]] = {}
        for each in self._responses:
            groups.setdefault(each.prompt, []).append(each.key)
        foreseen: dict[Key, float] = {}
        for prompt, keys in groups.items():
            estimate = self._estimates[prompt]
            foreseen.update({key: self._long[key] for key in keys if key in self._long})
            foreseen.update(dict.fromkeys(keys[: round(len(keys) * estimate.runaways)], float(self._longest)))
            others = [key for key in keys if key not in foreseen]
            most = LONG * self._longest if self._long else float(self._longest)
            for key, length in zip(others, estimate.quantiles(len(others)), strict=True):
                foreseen[key] = min(most, self._short.get(key, length))
        return [foreseen[each.key] for each in self._responses]

    def outlook(self, key: Key, tokens: int) -> tuple[float, float]:
        """Return the tokens that a response is expected still to need, and the chance that it is a runaway, for moves.

        Args:
            tokens: number that it has.
        """
        if self._truth:
            return self._truth[key] - tokens, 0.0
        if key in self._long:
            return self._long[key] - tokens, 0.0
        estimate = self._estimates[key[0]]
        if self._settings.planning != "optimal":
            # The other systems' rules look at counts and contexts, not at expected lengths.
            return max(0.0, estimate.mean - tokens), 0.0
        if tokens < self._short.get(key, 0.0):
            most, natural = self._longest - tokens, self._short[key] - tokens
            return natural + estimate.runaways * (most - natural), estimate.runaways
        return estimate.outlook(tokens, self._longest)
