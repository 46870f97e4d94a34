"""Conversions of TRL's tools and environments. Each function belongs to a row of `trl.py`."""

from typing import Any

from rlhfless_operator.convert.conversion import Left, Outcome, Theirs, Written, job_name

_MOST_TURNS = 1000
"""Most turns that a job allows. TRL's are not limited by default."""


def tools(value: Any, theirs: Theirs) -> Outcome:
    """Convert functions that the model may call."""
    if not value:
        return None
    places = [_place(str(name), theirs, "tools") for name in value]
    written = {"spec.environment.tools": [f"{file}:{name}" for file, name, _ in places]}
    return _noted(written, [note for *_, note in places])


def factory(value: Any, theirs: Theirs) -> Outcome:
    """Convert a class whose public methods are tools."""
    if not value:
        return None
    file, name, note = _place(str(value), theirs, "environment")
    return _noted({"spec.environment.python": {"file": file, "class": name}}, [note])


def turns(value: Any, theirs: Theirs) -> Outcome:
    """Convert the limit: after so many calls, the model has one more turn."""
    if not (theirs["tools"] or theirs["environment_factory"]):
        return None
    if value is None:
        return Written({"spec.environment.maxTurns": _MOST_TURNS}, "TRL's turns are not limited by default")
    return Written({"spec.environment.maxTurns": min(_MOST_TURNS, int(value) + 1)}, "the last turn calls nothing")


def environment_reward(theirs: Theirs) -> tuple[list[dict[str, Any]], str]:
    """Return the reward that an environment's own class gives, and a message about it for the user."""
    if not theirs["environment_factory"]:
        return [], ""
    name = job_name(str(theirs["environment_factory"]).rpartition(".")[2])
    return [{"name": name, "environment": {}}], f"remove reward {name} if its class has no get_reward"


def _place(function: str, theirs: Theirs, kind: str) -> tuple[str, str, str]:
    """Return the file and the name, and a message about it for the user."""
    module, _, name = function.rpartition(".")
    note = ""
    if not module:
        module, note = kind, f"its script has {name}: put it into {kind}.py"
    elif module == theirs.name:
        note = f"{name} is in the script itself: move it into a file that trains nothing when it is imported"
    return f"{module.replace('.', '/')}.py", name, note


def _noted(values: dict[str, Any], notes: list[str]) -> Outcome:
    said = "; ".join(note for note in notes if note)
    return Left(said, values) if said else Written(values, "relative to the job file")
