"""Rules for changing an existing job, for Python and for the API server."""

from rlhfless_operator.job.rule import CelRule

CHANGE_RULES = (
    CelRule("self.model == oldSelf.model", "model can't be changed: make a new job"),
    CelRule(
        "has(self.steps) == has(oldSelf.steps) && (!has(self.steps) || self.steps >= oldSelf.steps)",
        "steps may only grow",
    ),
    CelRule(
        "has(self.epochs) == has(oldSelf.epochs) && (!has(self.epochs) || self.epochs >= oldSelf.epochs)",
        "epochs may only grow",
    ),
)
"""Rules for changing an existing job."""

FIXED_FIELDS = ("model", "algorithm", "data", "sampling", "batch", "seed", "optimizer.name", "async")
"""Sections that can't change once a step is done, because that would change the meaning of finished steps."""


def _unchanged(name: str) -> str:
    same = f"self.spec.{name} == oldSelf.spec.{name}"
    if name != "async":
        return same
    # It has no default.
    return f"has(self.spec.{name}) == has(oldSelf.spec.{name}) && (!has(self.spec.{name}) || {same})"


FIXED_RULES = tuple(
    CelRule(
        f"!has(self.status) || !has(self.status.step) || self.status.step == 0 || {_unchanged(name)}",
        f"spec.{name} can't be changed once a step is done: undo the change, or make a new job",
    )
    for name in FIXED_FIELDS
    if name != "model"
)
"""The same rules for the API server, over the whole resource. The model can never change."""
