"""The inputs of a job that its document only names: which there are, and which may change during the run."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhfless_functions.settings import DataSettings, RewardSettings
from rlhfless_operator.job.paths import is_template_text
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.input_digests import Digests, InputDigest, take_digest

_FIXED = ("spec.model.", "spec.data.")
"""Inputs that can't change once a step is done, as the sections that name them."""


def is_fixed(name: str) -> bool:
    """Return whether an input can't change once a step is done."""
    return name.startswith(_FIXED)


def is_reward(name: str) -> bool:
    """Return whether an input makes rewards."""
    return "rewards[" in name


def take_digests(spec: RLHFJobSpec, known: Mapping[str, InputDigest]) -> Digests:
    """Take the digests of a job's inputs that can be seen from here.

    Args:
        spec: the job's, with resolved paths.
        known: those that an earlier driver took; what did not change since is not read again.
    """
    if spec.rehearsal is not None:
        return {}
    taken = {
        each.name: take_digest(
            each.source, known.get(each.name), model=each.is_model, code=each.is_code, settings=each.settings
        )
        for each in _inputs(spec)
    }
    return {name: digest for name, digest in taken.items() if digest is not None}


def described(name: str, digest: InputDigest) -> str:
    """Describe an input for people."""
    return f"the content of {digest.source} ({name})"


@dataclass(frozen=True)
class _Input:
    name: str
    source: str
    is_model: bool = False
    is_code: bool = False
    settings: str = ""


def _inputs(spec: RLHFJobSpec) -> Iterator[_Input]:
    model = spec.model
    yield _Input("spec.model.source", model.source, is_model=True)
    if model.tokenizer is not None:
        yield _Input("spec.model.tokenizer", model.tokenizer, is_model=True)
    if model.chat_template is not None and not is_template_text(model.chat_template):
        yield _Input("spec.model.chatTemplate", model.chat_template)
    yield from _data("spec.data", spec.data)
    yield from _rewards("spec.rewards", spec.rewards)
    if spec.environment is not None:
        read_as = hashlib.sha256(spec.environment.model_dump_json(exclude={"pods"}).encode()).hexdigest()
        for number, file in enumerate(spec.environment.files):
            yield _Input(f"spec.environment ({number})", file, is_code=True, settings=read_as)
    if spec.evaluation is not None:
        read_as = hashlib.sha256(spec.evaluation.data.model_dump_json().encode()).hexdigest()
        for each in _data("spec.evaluation.data", spec.evaluation.data):
            yield _Input(each.name, each.source, is_code=each.is_code, settings=read_as)
        yield from _rewards("spec.evaluation.rewards", spec.evaluation.rewards or [])


def _data(field: str, data: DataSettings) -> Iterator[_Input]:
    for number, part in enumerate(data.parts):
        place = field if data.sources is None else f"{field}.sources[{number}]"
        yield _Input(f"{place}.source", part.source)
        for name, function in (("map", part.map), ("filter", part.filter)):
            if function is not None:
                yield _Input(f"{place}.{name}.file", function.file, is_code=True)


def _rewards(field: str, rewards: list[RewardSettings]) -> Iterator[_Input]:
    for position, reward in enumerate(rewards):
        if reward.python is not None:
            yield _Input(f"{field}[{position}].python.file", reward.python.file, is_code=True)
        if reward.model is not None:
            yield _Input(f"{field}[{position}].model.source", reward.model.source, is_model=True)
