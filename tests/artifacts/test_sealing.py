"""No byte of a sealed file changes unseen, and a file without a seal is read as it is."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts.sealing import parse_sealed, sealed_json
from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan, read_prepared, write_prepared

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text().filter(lambda key: key != "checksum"), inner),
    max_leaves=8,
)
_TEXTS = st.just("xxh3-128:") | st.just('"checksum": "xxh3-128:') | st.text()


@given(value=_JSON | st.dictionaries(_TEXTS.filter(lambda key: key != "checksum"), _TEXTS, max_size=3))
def test_what_is_written_is_read(value: Any) -> None:
    assert parse_sealed(sealed_json(value)) == value


def outcome(content: bytes) -> Any:
    try:
        return parse_sealed(content)
    except ValueError:
        return "damaged"


def test_every_flip_of_a_byte_of_a_json_file_is_seen_or_harmless() -> None:
    value = {"groups": [{"prompt": 3, "spread": 0.25}], "metrics": {"reward/sum": 1.5}, "cursor": "0a"}
    content = sealed_json(value)
    seen = 0
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            found = outcome(bytes(flipped))
            seen += found == "damaged"
            # The damage may be in the name of the checksum. Then all else is sound.
            rest = {key: found[key] for key in value if key in found} if isinstance(found, dict) else found
            assert rest in ("damaged", value), (place, bit)
    assert seen > 0.9 * 8 * len(content)


def prepared(index: int) -> PreparedSample:
    return PreparedSample(
        prompt=1,
        index=index,
        prompt_tokens=[5, 6, 7],
        response_tokens=[8, 9],
        log_probs=[-0.5, -1.25],
        finish_reason="stop",
        versions=[VersionSpan(0, 0, 2)],
        reward=1.0,
        reward_terms={"digits": 1.0},
        advantages=[0.5, 0.5],
    )


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flip_of_a_byte_of_a_prepared_part_is_seen_or_harmless(tmp_path: Path, step: int) -> None:
    uri = str(tmp_path / "part.parquet")
    write_prepared(uri, [prepared(0), prepared(1)])
    content, expected = Path(uri).read_bytes(), read_prepared([uri])
    seen = 0
    places = range(0, len(content), step)
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        Path(uri).write_bytes(flipped)
        try:
            assert read_prepared([uri]) == expected, place
        except artifacts.ArtifactCorruptError:
            seen += 1
    # The words before the checksum, and nothing else, may be damaged unseen.
    assert seen >= len(places) - len("xxh3-128:")


def test_a_part_that_others_wrote_is_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    uri = str(tmp_path / "part.parquet")
    write_prepared(uri, [prepared(0)])
    expected = read_prepared([uri])
    pq.write_table(pq.read_table(uri).replace_schema_metadata(), uri)
    assert read_prepared([uri]) == expected


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_cut_file_names_itself_and_the_remedy(tmp_path: Path, cut: int) -> None:
    uri = str(tmp_path / "result.json")
    artifacts.write_json(uri, {"part": "x", "metrics": {}})
    Path(uri).write_bytes(Path(uri).read_bytes()[:-cut])
    with pytest.raises(artifacts.ArtifactCorruptError, match=r"result\.json is damaged .*restore it from a copy"):
        artifacts.read_json(uri)
