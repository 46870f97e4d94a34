"""A policy's knowledge of how samples act in their environments."""

from rlhfless_operator.planner.acting import NO_ACTING, Acting, ActingPredictor
from rlhfless_operator.simulator.traces import TraceStep


class Acted:
    """The samples of all steps so far, by prompt and in all."""

    def __init__(self) -> None:
        self.predictor = ActingPredictor(lambda: self._by_token)
        self._by_token = NO_ACTING

    def observe(self, step: TraceStep) -> None:
        """Learn from a step. As in the live loop, prompts that were never seen act as those of the newest steps."""
        if not step.acted:
            return
        acted = {key: Acting(each.away_seconds, each.given) for key, each in step.acted.items()}
        self.predictor.observe(acted)
        sampled = sum(each.sampled for each in step.acted.values())
        whole = Acting(
            sum(each.away_seconds for each in acted.values()), sum(each.given_tokens for each in acted.values())
        )
        self._by_token = whole.times(1 / max(1, sampled))
