"""Print the requirements of an image, one a line: those of the project and of some extras, from pyproject.toml.

Only the standard library, and no project code: the layer that is built from this changes with its requirements alone.
"""

import argparse
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str], *, build: bool = False) -> list[str]:
    """The requirements that pyproject.toml names, sorted.

    Args:
        pyproject: its text.
        extras: names under `optional-dependencies`.
        build: those of the build system as well.

    Raises:
        SystemExit: for an extra that it does not have.
    """
    document = tomllib.loads(pyproject)
    project = document["project"]
    found = set(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            raise SystemExit(f"pyproject.toml has no extra {extra!r}, only {sorted(project['optional-dependencies'])}")
        found.update(project["optional-dependencies"][extra])
    if build:
        found.update(document["build-system"]["requires"])
    return sorted(found)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[], help="an extra whose requirements are wanted")
    parser.add_argument("--build", action="store_true", help="those of the build system as well")
    arguments = parser.parse_args()
    text = (Path.cwd() / "pyproject.toml").read_text()
    print("\n".join(requirements(text, arguments.extra, build=arguments.build)))


if __name__ == "__main__":
    main()
