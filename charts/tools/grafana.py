"""Grafana's JSON of the dashboards, by Grafana's own builders."""

import json
from collections.abc import Sequence
from typing import Any

from dashboards import PAGES, Page, Panel
from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)


def dashboards() -> dict[str, Any]:
    """Every dashboard as Grafana's JSON, by name."""
    return {name: json.loads(JSONEncoder(sort_keys=True).encode(_grafana(name, page))) for name, page in PAGES.items()}


_SOURCE = DataSourceRef("prometheus", "$datasource")


def _grafana(name: str, page: Page) -> Any:
    made = (
        dashboard.Dashboard(page.title)
        .uid(f"rlhfless-{name}")
        .description(page.description)
        .tags(["rlhfless"])
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("rlhfless")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["rlhfless"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_label_variable("namespace", "label_values(rlhfless_job_phase, namespace)"))
        .with_variable(_label_variable("job", 'label_values(rlhfless_job_phase{namespace=~"$namespace"}, job)'))
        .with_variable(
            dashboard.IntervalVariable("window")
            .label("Window")
            .values("1m,5m,10m,30m,1h,6h,1d")
            .current(VariableOption(text="10m", value="10m", selected=True))
        )
    )
    for panel in page.panels:
        made = made.with_panel(_panel(panel))
    return made.build()


def _label_variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> Any:
    made = _kind(panel)
    made = made.title(panel.title).description(panel.description).datasource(_SOURCE).unit(panel.unit)
    made = made.span(panel.width).height(4 if panel.kind == "number" else 8)
    for letter, query in zip("ABCDEF", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
        made = made.with_target(target.instant() if panel.kind in ("number", "bars") else target.range())
    return made


def _kind(panel: Panel) -> Any:
    match panel.kind:
        case "number":
            return stat.Panel().graph_mode(BigValueGraphMode.NONE).decimals(2).reduce_options(_last())
        case "bars":
            return bargauge.Panel().min(0).reduce_options(_last())
        case "states":
            return (
                statetimeline.Panel()
                .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
                .thresholds(_thresholds(((None, "transparent"), (0.01, "green"))))
                .show_value(VisibilityMode.NEVER)
                .decimals(1)
            )
        case "stack":
            return (
                timeseries.Panel().stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30).min(0)
            )
        case "lines":
            return timeseries.Panel().show_points(VisibilityMode.AUTO)


def _last() -> Any:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> Any:
    thresholds = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    return thresholds.steps([Threshold(value, color) for value, color in steps])
