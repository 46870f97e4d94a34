"""Where a job's folder is: always in its namespace's own part of a store that the administrator gives."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.controller.tenancy.folders import OutsideStoreError, place_of

FURTHER = ("s3://other", "/mnt/fast")


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("runs", "s3://bucket/base/team/runs/job"),
        ("./a//b/", "s3://bucket/base/team/a/b/job"),
        ("s3://bucket/base/team/runs", "s3://bucket/base/team/runs/job"),
        ("s3://bucket/base", "s3://bucket/base/team/job"),
        ("s3://bucket/base/theirs/runs", "s3://bucket/base/team/theirs/runs/job"),
        ("s3://other/x", "s3://other/team/x/job"),
        ("/mnt/fast/x/", "/mnt/fast/team/x/job"),
        ("file:///mnt/fast/x", "/mnt/fast/team/x/job"),
        ("~/x", "s3://bucket/base/team/~/x/job"),
    ],
)
def test_a_folder_is_in_its_namespaces_part_of_a_store(uri: str, root: str) -> None:
    assert place_of(uri, "team", "job", "s3://bucket/base", FURTHER).root == root


@pytest.mark.parametrize(
    "uri",
    [
        "../../etc",
        "runs/../../theirs/runs",
        "/etc",
        "/mnt",
        "/mnt/faster",
        "/mnt/fast/../slow",
        "s3://bucket",
        "s3://bucket/base/../other",
        "s3://bucket/based",
        "s3a://bucket/base",
        "simplecache::s3://bucket/base",
        "file:///etc",
        "local:///etc",
        "memory://x",
        "s3://bucket/base\n",
    ],
)
def test_a_folder_anywhere_else_is_refused(uri: str) -> None:
    with pytest.raises(OutsideStoreError, match=r"spec\.artifacts\.uri: .*; write"):
        place_of(uri, "team", "job", "s3://bucket/base", FURTHER)


PARTS = ["/", ".", "..", "a", "base", "team", "theirs", "file:", "::", "s3://", "~"]


@given(st.lists(st.sampled_from(PARTS), max_size=9))
def test_no_uri_leads_out_of_a_namespace(parts: list[str]) -> None:
    try:
        root = place_of("".join(parts) or "runs", "team", "job", "/base", ("s3://base",)).root
    except OutsideStoreError:
        return
    path = PurePosixPath(root.removeprefix("s3:/"))
    assert path.is_relative_to("/base/team")
    assert ".." not in path.parts
    assert path.name == "job"
