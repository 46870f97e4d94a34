"""Published forms of configurations: each becomes YAML that validates, whatever its values are."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlhfless_operator.convert import convert, job_yaml, table
from rlhfless_operator.convert.openrlhf import ROWS as OPENRLHF
from rlhfless_operator.convert.reading import Configuration
from rlhfless_operator.convert.trl import ROWS as TRL
from rlhfless_operator.convert.verl import ROWS as VERL
from rlhfless_operator.job.reading.validation import parse_job
from tests.convert.forms import FORMS, OF_EACH, PAGE, Form, converted, page, text_of

VERLS = [form for form in FORMS if form.name.startswith("verl")]


def name_of(value: Form | int) -> str:
    return value.name if isinstance(value, Form) else str(value)


def check(form: Form, seed: int, folder: Path) -> None:
    fields, text = text_of(form, seed)
    conversion = converted(form, text, folder)
    parse_job(job_yaml(conversion))
    report = table(conversion)
    for name in fields:
        if form.file != "train.py" and fields[name] is not False:
            assert f"{name}: " in report, name


@pytest.mark.parametrize(("form", "seed"), itertools.product(FORMS, range(2)), ids=name_of)
def test_a_configuration_of_each_form_validates_and_reports_every_field(form: Form, seed: int, tmp_path: Path) -> None:
    check(form, 1000 + seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "seed"), itertools.product(FORMS, range(OF_EACH)), ids=name_of)
def test_two_hundred_configurations_validate_and_report_every_field(form: Form, seed: int, tmp_path: Path) -> None:
    check(form, seed, tmp_path)


@pytest.mark.slow
def test_the_page_of_the_forms_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.convert.forms"


@pytest.mark.parametrize("seed", range(3))
def test_the_forms_of_verl_come_to_the_same(seed: int, tmp_path: Path) -> None:
    documents = [converted(form, text_of(form, seed)[1], tmp_path).document for form in VERLS]
    for document in documents:
        document["metadata"].pop("name")
    assert all(document == documents[0] for document in documents)


# --- any value of any field ---

ODD = [
    "1e-6",
    "a\n\nb: c",
    "#x",
    "- a",
    "{",
    "0x1",
    "0E0",
    "y",
    "12:30",
    "yes",
    "~",
    "\x00",
    "\ud800",
    "\u2028",
    "a.jsonl",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5000),
    st.floats(allow_nan=True),
    st.text(max_size=20),
    st.sampled_from(ODD),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=2))
PHASES = [Phase.generate, Phase.shrink]  # the one that explains a failure traces every line, which is slow
PEERS = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF}


@pytest.mark.parametrize("peer", PEERS)
@settings(
    max_examples=10, phases=PHASES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_job_is_yaml_that_validates_whatever_the_values_are(peer: Any, data: st.DataObject) -> None:
    written = [name for name, row in PEERS[peer].items() if not hasattr(row.convert, "part")]
    names = data.draw(st.lists(st.sampled_from(written) | st.sampled_from(list(PEERS[peer])), max_size=12))
    fields = {name: data.draw(VALUES) for name in names}
    conversion = convert(Configuration(peer, fields), "x.yaml", 2)
    parse_job(job_yaml(conversion))
