"""The hooks of pre-commit run what `make lint` runs."""

import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    made = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    repositories = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for repository in repositories for hook in repository["hooks"]] == made
