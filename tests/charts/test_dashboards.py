"""The dashboards and alerts, by a real Prometheus that scrapes the operator's metrics during a real training run.

Needs Debian's `prometheus` (with promtool); the alerts also need helm.
"""

import asyncio
import json
import math
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_functions import artifacts
from rlhfless_functions.api import Event, RunRequest, Started
from rlhfless_functions.runtime.addresses import free_port
from rlhfless_operator.controller.endpoints import serve_metrics
from rlhfless_operator.controller.metering import Metering
from rlhfless_operator.controller.prometheus import OperatorMetrics
from rlhfless_operator.job.actor_range import actor_range
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.base import StateChange, StateListener
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.run import AvailableGpus
from tests.jobs import write_tiny_job
from tests.prerequisites import needs_helm, needs_prometheus

CHART = Path(__file__).resolve().parents[2] / "charts" / "rlhfless"
DASHBOARDS = {file.stem: json.loads(file.read_text()) for file in sorted((CHART / "dashboards").glob("*.json"))}
WINDOW_SECONDS = 300

looks_at_panels = needs_prometheus("no panel is looked at")
renders_alerts = needs_helm("no alert is tried")
tries_alerts = needs_prometheus("no alert is tried")


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that has watched a run, from one of its scrapes to another."""

    url: str
    begin: float
    end: float

    def ask(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            data = json.load(answer)["data"]
        assert isinstance(data["result"], list)
        return data["result"]

    def values(self, expression: str, *, instant: bool) -> dict[str, list[float]]:
        """The finite values of each series: over the whole run, or at its end."""
        if instant:
            found = {
                json.dumps(one["metric"]): [one["value"]] for one in self.ask("query", query=expression, time=self.end)
            }
        else:
            # The last look is at the end, not half a second before.
            begin = self.end - math.ceil((self.end - self.begin) / 0.5) * 0.5
            span = {"start": begin, "end": self.end, "step": 0.5}
            results = self.ask("query_range", query=expression, **span)
            found = {json.dumps(one["metric"]): one["values"] for one in results}
        numbers = {series: [float(text) for _, text in pairs] for series, pairs in found.items()}
        return {series: [one for one in many if math.isfinite(one)] for series, many in numbers.items()}


class StandInPlatform(LocalPlatform):
    """Local processes where a cluster's pods would be; they learn the third step once the first has been scraped."""

    def __init__(self, until_scraped: Callable[[], float], **given: Any) -> None:
        super().__init__(**given)
        self._until_scraped = until_scraped

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        if (request.key.stage, request.key.step) == ("learning", 3):
            await asyncio.to_thread(self._until_scraped)
        async with aclosing(super().run(request)) as events:
            async for event in events:
                where = {"place": ["node", "zone"]}
                yield event.model_copy(update=where) if isinstance(event, Started) else event

    async def open(self) -> None:
        """There is nothing to make."""

    async def remove(self) -> None:
        """There is nothing to remove."""


async def train(file: Path, metrics: OperatorMetrics, port: int, until_scraped: Callable[[], float]) -> float:
    """Run a job as the controller does, with its metrics on a port; when all of it had been scraped."""
    job = load_job(file).resolve_paths(file.parent)
    folder = JobFolder(artifacts.join(job.spec.artifacts.uri, job.metadata.name))
    meter = metrics.job("team", job.metadata.name)

    def make_platform(on_state: StateListener) -> JobPlatform:
        def both(change: StateChange) -> None:
            on_state(change)
            meter.observe(change)

        platform = StandInPlatform(
            until_scraped,
            keep_alive={"generation": 0.0, "preparation": 60.0, "learning": 60.0},
            threads={"generation": 1, "preparation": 1, "learning": 1},
            log_path=file.parent / "instances.jsonl",
            on_state=both,
            stall_seconds=60.0,
        )
        member = PoolMember("uid", "team", job.metadata.name, {})
        return JobPlatform(platform, member, Metering(meter, on_ready=lambda: None))

    async with serve_metrics(metrics, port):
        await asyncio.to_thread(until_scraped)
        metrics.show_phase("team", job.metadata.name, "Running")
        await drive(
            job,
            folder,
            make_platform,
            LiveProgress(on_note=lambda note: None),
            AvailableGpus(actor_range(job.spec)),
            on_open=meter.attach,
        )
        return await asyncio.to_thread(until_scraped)


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes a port every second; yields its address."""
    port = free_port()
    scrape = {
        "job_name": "rlhfless",
        "honor_labels": True,
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm_start: None) -> Iterator[Prometheus]:
    """A tiny job was trained, and a Prometheus watched."""
    folder = tmp_path_factory.mktemp("dashboards")
    file = write_tiny_job(
        *(folder, tiny_model),
        evaluation={"data": {"source": "train.jsonl"}},
        planning={"policy": "cost"},
        prices={"instanceHour": "10.00"},
        budget={"gpuHours": 100.0},
        steps=5,
    )
    port = free_port()
    with prometheus(folder, port) as url:
        watcher = Prometheus(url, time.time(), 0.0)

        def until_scraped() -> float:
            """Wait for two scrapes from now on; when the last was."""
            wanted, deadline = time.time() + 1.0, time.monotonic() + 120
            while time.monotonic() < deadline:
                try:
                    last = watcher.ask("query", query="timestamp(rlhfless_operator_jobs)")
                except OSError:
                    last = []
                if last and (scraped := float(last[0]["value"][1])) > wanted:
                    return scraped
                time.sleep(0.1)
            pytest.fail((folder / "prometheus.log").read_text()[-3000:])

        end = asyncio.run(train(file, OperatorMetrics(), port, until_scraped))
        yield Prometheus(url, watcher.begin, end)


def as_grafana_sends_it(expression: str, seconds: float) -> str:
    """An expression with its variables filled in: all namespaces and jobs."""
    window, whole = f"{WINDOW_SECONDS}s", f"{math.ceil(seconds)}s"
    variables = {"$namespace": ".*", "$job": ".*", "$window": window, "$__rate_interval": "20s", "$__range": whole}
    for name, value in variables.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
]


@looks_at_panels
@pytest.mark.parametrize("panel", PANELS)
def test_no_panel_is_empty_after_a_run(watched: Prometheus, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = as_grafana_sends_it(target["expr"], watched.end - watched.begin)
        values = watched.values(expression, instant=target["instant"])
        assert any(values.values()), expression


@looks_at_panels
def test_the_panels_tell_what_the_run_did(watched: Prometheus) -> None:
    def last(expression: str) -> float:
        (values,) = watched.values(expression, instant=True).values()
        return values[-1]

    assert last("rlhfless_steps_total") == last("rlhfless_job_steps") == 5
    cost, seconds = last("sum(rlhfless_cost_total)"), last("sum(rlhfless_gpu_seconds_total)")
    assert cost == pytest.approx(seconds * 10 / 3600, rel=0.01)
    assert last("rlhfless_cost_forecast_total") > 0
    assert last('rlhfless_weights_read_bytes_total{distance="same_node"}') > 0
    assert last('sum(rlhfless_weights_read_bytes_total{distance!="same_node"})') == 0
    planned = {kind: last(f'rlhfless_cost_plan_total{{kind="{kind}"}}') for kind in ("bound", "cheapest", "chosen")}
    assert 0 < planned["bound"] <= planned["chosen"] * 1.001 and 0 < planned["cheapest"] <= planned["chosen"] * 1.001


def test_dashboards_have_names_of_their_own_and_lead_to_each_other() -> None:
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS) == 4
    for dashboard in DASHBOARDS.values():
        assert dashboard["links"][0]["tags"] == dashboard["tags"] == ["rlhfless"]
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == [
            "datasource",
            "namespace",
            "job",
            "window",
        ]
        for panel in dashboard["panels"]:
            assert panel["description"].endswith(".")
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


# --- alerts ---


@pytest.fixture(scope="module")
def alerts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules of the chart, as Prometheus reads them."""
    values = CHART / "ci" / "monitoring-service.yaml"
    command = ["helm", "template", "it", CHART, "--values", values, "--show-only", "templates/prometheusrule.yaml"]
    rules = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    file = tmp_path_factory.mktemp("alerts") / "rules.yaml"
    file.write_text(yaml.safe_dump(rules["spec"]))
    subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
    return file


OF = 'namespace="team",job="tiny"'
ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    # Series for which it fires after three hours, and those that differ where it does not.
    "RLHFJobStuck": (
        {
            f"rlhfless_job_last_progress_timestamp_seconds{{{OF}}}": "0x180",
            f'rlhfless_job_phase{{{OF},phase="Running"}}': "1x180",
        },
        {f'rlhfless_job_phase{{{OF},phase="Running"}}': "0x180"},
    ),
    "RLHFJobFailed": (
        {f'rlhfless_job_phase{{{OF},phase="Failed"}}': "1x180"},
        {f'rlhfless_job_phase{{{OF},phase="Failed"}}': "0x180"},
    ),
    "RLHFJobCostOverForecast": (
        {
            f'rlhfless_cost_total{{{OF},stage="generation"}}': "0+2x180",
            f'rlhfless_cost_total{{{OF},stage="learning"}}': "0+100x180",
            f'rlhfless_cost_plan_total{{{OF},kind="chosen"}}': "0+1x180",
        },
        {f'rlhfless_cost_total{{{OF},stage="generation"}}': "0+1x180"},
    ),
    "RLHFJobIdleShareHigh": (
        {
            f'rlhfless_gpu_seconds_total{{{OF},stage="learning",state="idle"}}': "0+40x180",
            f'rlhfless_gpu_seconds_total{{{OF},stage="learning",state="busy"}}': "0+60x180",
        },
        {f'rlhfless_gpu_seconds_total{{{OF},stage="learning",state="busy"}}': "0+200x180"},
    ),
    "RLHFJobColdStartSlow": (
        {
            f'rlhfless_cold_start_seconds_bucket{{{OF},stage="learning",le="60"}}': "0x180",
            f'rlhfless_cold_start_seconds_bucket{{{OF},stage="learning",le="600"}}': "0+1x180",
            f'rlhfless_cold_start_seconds_bucket{{{OF},stage="learning",le="+Inf"}}': "0+1x180",
        },
        {f'rlhfless_cold_start_seconds_bucket{{{OF},stage="learning",le="60"}}': "0+1x180"},
    ),
    "RLHFlessOperatorAbsent": ({}, {"rlhfless_operator_jobs": "0x180"}),
}


@renders_alerts
@tries_alerts
@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_when_it_is_to_and_not_otherwise(alerts: Path, tmp_path: Path, name: str) -> None:
    bad, good = ALERTS[name]
    at = "170m"
    for series, fires in ((bad, True), ({**bad, **good}, False)):
        tests = {
            "rule_files": [str(alerts)],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": one, "values": values} for one, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                            "eval_time": at,
                            "exp_samples": [{"labels": "{}", "value": int(fires)}],
                        }
                    ],
                }
            ],
        }
        file = tmp_path / "tests.yaml"
        file.write_text(yaml.safe_dump(tests))
        done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@renders_alerts
@tries_alerts
def test_every_alert_is_tried(alerts: Path) -> None:
    (group,) = yaml.safe_load(alerts.read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == set(ALERTS)
    assert all(rule["labels"]["team"] == "training" for rule in group["rules"])


# --- the page about operations ---

OPERATIONS = (CHART.parents[1] / "docs" / "operations.md").read_text()


def test_every_metric_is_explained() -> None:
    metrics = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in OperatorMetrics().registry.collect()
        if family.name.startswith("rlhfless_")
    }
    assert set(re.findall(r"^\| `(rlhfless_\w+)` \|", OPERATIONS, re.MULTILINE)) == metrics


def test_every_alert_is_explained() -> None:
    assert set(re.findall(r"^\| `(RLHF\w+)` \|", OPERATIONS, re.MULTILINE)) == set(ALERTS)
