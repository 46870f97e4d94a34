"""Writes the generated files of the chart: `python charts/tools [FOLDER]`.

The definition of jobs, the schema of `pods` and `pools`, the README and the dashboards, into the chart or a copy of it.
"""

import json
import sys
from pathlib import Path

from grafana import dashboards
from readme import readme

from rlhfless_operator.job.generated.crd import NAME, crd_yaml
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.platforms.cluster_settings import PoolSettings

CHART = Path(__file__).resolve().parents[1] / "rlhfless"


def write(chart: Path) -> None:
    """Write everything into a folder that has the chart's `values.yaml` and `values.schema.json`."""
    plural, _, group = NAME.partition(".")
    (chart / "files" / f"{plural}.{group}.yaml").write_text(crd_yaml())
    schema_file = chart / "values.schema.json"
    schema = json.loads(schema_file.read_text())
    schema_file.write_text(json.dumps({**schema, "$defs": definitions()}, indent=2) + "\n")
    (chart / "README.md").write_text(readme((chart / "values.yaml").read_text()))
    for name, dashboard in dashboards().items():
        (chart / "dashboards" / f"{name}.json").write_text(json.dumps(dashboard, indent=1) + "\n")


def definitions() -> dict[str, object]:
    """What `pods` and `pools` may say: the operator's own models of them."""
    found: dict[str, object] = {}
    for model in (PodsSpec, PoolSettings):
        schema = model.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
        found |= schema.pop("$defs", {})
        found[model.__name__] = schema
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else CHART)
