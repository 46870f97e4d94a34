"""The chart's README, from the comments of its values.yaml."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

_INTRODUCTION = """\
<!-- Made from values.yaml by `make docs`; do not edit. -->

# The rlhfless chart

Installs the operator that runs `RLHFJob`s on Kubernetes 1.29 or newer with Knative Serving 1.21 or newer.

```
helm install rlhfless charts/rlhfless --namespace rlhfless --create-namespace \\
    --set artifacts.existingClaim=rlhfless-artifacts
```

[docs/install.md](../../docs/install.md) says what the cluster needs first, and `rlhfless preflight` what of it is
missing.
`ci/` holds values for common situations: each is rendered and given to an API server by the tests.

## Values

| Value | Default | Meaning |
|---|---|---|
"""
_KEY = re.compile(r"^( *)([A-Za-z]\w*):")


@dataclass(frozen=True)
class Value:
    """One documented value."""

    path: tuple[str, ...]
    description: str


def readme(values: str) -> str:
    """The README as Markdown.

    Args:
        values: text of values.yaml.
    """
    data = yaml.safe_load(values)
    rows = [
        f"| `{'.'.join(value.path)}` | `{_default(data, value.path)}` | {value.description} |"
        for value in documented(values)
    ]
    return _INTRODUCTION + "\n".join(rows) + "\n"


def documented(values: str) -> Iterator[Value]:
    """Every value with a comment that begins with `--`, in the file's order."""
    path: list[str] = []
    comment: list[str] = []
    for line in values.splitlines():
        text = line.strip()
        if text.startswith("# --"):
            comment = [text.removeprefix("# --").strip()]
        elif text.startswith("#") and comment:
            comment.append(text.removeprefix("#").strip())
        elif match := _KEY.match(line):
            depth = len(match[1]) // 2
            path[depth:] = [match[2]]
            if comment:
                yield Value(tuple(path), " ".join(comment))
            comment = []


def _default(data: Any, path: tuple[str, ...]) -> str:
    for key in path:
        data = data[key]
    return json.dumps(data)
