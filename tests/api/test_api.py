"""The wire contract: everything survives the wire, and what the other side cannot know is refused."""

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlhfless_functions import api
from rlhfless_functions.api import (
    Done,
    Event,
    Heartbeat,
    RunRequest,
    Started,
    UnsupportedProtocolError,
    dump_event,
    parse_event,
    parse_request,
)
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    EnvironmentSettings,
    KlSettings,
    RewardSettings,
)

REQUESTS = get_args(get_args(RunRequest)[0])
EVENTS = get_args(get_args(Event)[0])
RESULTS = (api.MaterializeResult, api.GenerationResult, api.PrepareResult, api.LearnResult, api.ExportResult)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT, lambda x: st.lists(x, max_size=2), max_leaves=3
)

# Models whose fields depend on each other: a few whole values that fit.
WHOLE: dict[type[BaseModel], st.SearchStrategy[Any]] = {
    AlgorithmSettings: st.sampled_from(get_args(AlgorithmSettings.model_fields["name"].annotation)).map(
        lambda name: AlgorithmSettings(name=name).resolved()
    ),
    KlSettings: st.builds(KlSettings, coefficient=st.floats(0, 1), estimator=st.sampled_from(["k2", "k3"])),
    BatchSettings: st.builds(
        BatchSettings, prompts_per_step=st.integers(1, 9), minibatch_samples=st.just(4) | st.none()
    ),
    EnvironmentSettings: st.sampled_from(
        [{"tools": ["t.py:add"], "maxTurns": 3}, {"python": {"file": "env.py", "class": "Maze"}, "memory": "1Gi"}]
    ).map(EnvironmentSettings.model_validate),
    RewardSettings: st.sampled_from(
        [
            {"name": "a", "python": {"file": "r.py", "style": "verl"}, "on_error": "unscorable", "timeout": 0.1},
            {"name": "b", "http": {"url": "https://host/score"}, "weight": -0.5},
            {"name": "c", "model": {"source": "rm"}, "memory": 2**33 + 1},
            {"name": "d", "exact_match": {"pattern": "#(\\d+)", "require_end": True}},
            {"name": "e", "code": {"timeout": 2.5}},
        ]
    ).map(RewardSettings.model_validate),
}


def anything(kind: Any, constraints: list[Any]) -> st.SearchStrategy[Any]:
    """Any value of a field's type within its constraints."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return anything(arguments[0], [inner for part in arguments[1:] for inner in part.metadata])
    if origin in (Union, types.UnionType):
        return st.one_of([anything(argument, constraints) for argument in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        least = next((bound.min_length for bound in constraints if isinstance(bound, MinLen)), 0)
        return st.lists(anything(arguments[0], []), min_size=least, max_size=least + 2)
    if origin is tuple:
        return st.tuples(*(anything(argument, []) for argument in arguments))
    if origin is dict:
        keys = TEXT if arguments[0] is str else anything(arguments[0], [])
        return st.dictionaries(keys, anything(arguments[1], []), max_size=2)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return whole(kind)
    return scalar(kind, constraints)


def scalar(kind: Any, constraints: list[Any]) -> st.SearchStrategy[Any]:
    low = next(
        (bound.ge if isinstance(bound, Ge) else bound.gt for bound in constraints if isinstance(bound, Ge | Gt)), 0
    )
    high = next(
        (bound.le if isinstance(bound, Le) else bound.lt for bound in constraints if isinstance(bound, Le | Lt)), 9
    )
    if kind is int:
        return st.integers(low, high)
    if kind is float:
        return st.floats(low, high, exclude_min=True, exclude_max=True)
    if kind is str:
        least = next((bound.min_length for bound in constraints if isinstance(bound, MinLen)), 0)
        most = next((bound.max_length for bound in constraints if isinstance(bound, MaxLen)), 8)
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=min(most, 8))
    return {bool: st.booleans(), types.NoneType: st.none(), Any: JSON}[kind]


def with_parts(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose samples are in its parts, or name none."""
    count, parts = len(batch["samples"]), len(batch["parts"])
    numbers = [number % parts for number in batch["part_of"]] if parts else []
    batch["part_of"] = numbers[:count] if len(numbers) >= count else []
    batch["factors"] = batch["factors"][:count] if len(batch["factors"]) >= count else []
    return batch


def with_one_source_or_several(data: dict[str, Any]) -> dict[str, Any]:
    """Data that has `sources` where it has no `source`, and the other way round."""
    if data["source"] is not None or data["sources"] is None:
        data["sources"], data["source"] = None, data["source"] or "train.jsonl"
    return data


def whole(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Any value of a model."""
    if model in WHOLE:
        return WHOLE[model]
    if model is api.BatchReference:
        fields = {name: anything(info.annotation, info.metadata) for name, info in model.model_fields.items()}
        return st.fixed_dictionaries(fields).map(lambda values: model(**with_parts(values)))
    fields = {name: anything(info.annotation, info.metadata) for name, info in model.model_fields.items()}
    if model is DataSettings:
        return st.fixed_dictionaries(fields).map(lambda values: model(**with_one_source_or_several(values)))
    if "protocol" in fields:
        fields["protocol"] = st.sampled_from([api.PROTOCOL, "1.7"])
    return st.fixed_dictionaries(fields).map(lambda values: model(**values))


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_every_request_survives_the_wire(model: type[BaseModel]) -> None:
    @settings(max_examples=40)
    @given(whole(model))
    def survives(request: Any) -> None:
        received = parse_request(request.model_dump_json().encode())
        assert type(received) is model
        assert received == request

    survives()


@pytest.mark.parametrize("model", EVENTS, ids=lambda model: model.__name__)
def test_every_event_survives_the_wire_as_one_line(model: type[BaseModel]) -> None:
    @settings(max_examples=40)
    @given(whole(model))
    def survives(event: Any) -> None:
        line = dump_event(event)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        received = parse_event(line)
        assert type(received) is model
        assert received == event

    survives()


@pytest.mark.parametrize("model", RESULTS, ids=lambda model: model.__name__)
def test_every_result_survives_inside_done(model: type[BaseModel]) -> None:
    @settings(max_examples=20)
    @given(whole(model))
    def survives(result: Any) -> None:
        done = parse_event(dump_event(Done(result=result.model_dump(mode="json"))))
        assert isinstance(done, Done)
        assert model.model_validate_json(json.dumps(done.result)) == result

    survives()


def a_request(**changes: Any) -> bytes:
    request = {
        "protocol": api.PROTOCOL,
        "task": "export",
        "key": {"job_uid": "u", "step": 1, "stage": "learning", "part": "export", "attempt": 0},
        "result": "file:///r.json",
        "model": {"source": "m"},
        "weights": {"version": 1, "uri": "file:///w"},
        "destination": "file:///d",
        "model_card": "",
        **changes,
    }
    return json.dumps(request).encode()


@pytest.mark.parametrize("protocol", ["2.0", "0.9", "10.0", "", "x"])
def test_an_unknown_major_version_is_refused_by_name(protocol: str) -> None:
    with pytest.raises(UnsupportedProtocolError, match=f"'{protocol}' is not supported: this side uses 1.0"):
        parse_request(a_request(protocol=protocol))
    with pytest.raises(UnsupportedProtocolError, match="same release of rlhfless"):
        parse_event(dump_event(Started(instance="i", protocol=protocol)))


def test_the_version_is_judged_before_anything_else_of_a_request() -> None:
    with pytest.raises(UnsupportedProtocolError):
        parse_request(b'{"protocol": "2.0", "task": "dream", "key": 7}')


def test_fields_that_a_newer_minor_version_added_are_ignored() -> None:
    older = parse_request(a_request())
    assert parse_request(a_request(protocol="1.9", added=True)).model_dump(exclude={"protocol"}) == older.model_dump(
        exclude={"protocol"}
    )
    assert parse_event(b'{"event": "heartbeat", "load": 0.5}') == Heartbeat()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"task": "dream"}, "dream"),
        ({"key": {"job_uid": "u", "step": -1, "stage": "learning", "part": "p", "attempt": 0}}, "step"),
        ({"model": {"source": "m", "dtype": "int4"}}, "dtype"),
        ({"model": {"source": "m", "sauce": "m"}}, "sauce"),
        ({"weights": {"version": "1", "uri": "w"}}, "version"),
        ({"destination": None}, "destination"),
        ({"protocol": 1}, "protocol"),
    ],
)
def test_a_bad_request_is_an_error_that_names_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_request(a_request(**change))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b"\xff", b"upstream connect error", b'{"task": "export"}'])
def test_what_is_no_request_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(body)


@pytest.mark.parametrize(
    "line",
    [
        b"activator request timeout\n",
        b"upstream connect error or disconnect/reset before headers",
        b"<html><body>502 Bad Gateway</body></html>",
        b"",
        b"\n",
        b"null",
        b"{}",
        b"[]",
        b'"done"',
        b'{"event": "dance"}',
        b'{"event": "done"}',
        b'{"event": "started", "instance": 5}',
        b'{"event": "done", "result": {}',
        b"\xff\xfe",
    ],
)
def test_the_words_of_a_proxy_are_no_event(line: bytes) -> None:
    with pytest.raises(ValueError, match="not an event"):
        parse_event(line)


@given(st.binary(max_size=64))
def test_no_line_whatsoever_is_more_than_a_value_error(line: bytes) -> None:
    try:
        event = parse_event(line)
    except ValueError:
        return
    assert parse_event(dump_event(event)) == event
