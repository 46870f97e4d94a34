"""`rlhfless plan`: forecast a step of a job."""

import importlib.util
import json
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rlhfless_functions.settings.base import parse_duration, parse_money
from rlhfless_operator.commands.options import JobFile, Settings
from rlhfless_operator.job.reading.validation import load_job


def plan(
    job_file: JobFile,
    gpu: Annotated[
        str | None, typer.Option("--gpu", "--device", help="H100, H200, A100 or L40S; detected by default.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", "--tensor-parallel", help="GPUs of an instance, with tensor parallelism.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or name, instead of model.source.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="Response lengths: the folder of an earlier run, or a trace in Parquet.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Probability that a drafted token is right; by default that of the trace's run."),
    ] = None,
    median_tokens: Annotated[
        float | None, typer.Option(help="Median response without a trace; by default a quarter of the longest.")
    ] = None,
    startup: Annotated[str | None, typer.Option(help="Start-up time of an instance, such as 30s.")] = None,
    instance_hour: Annotated[str | None, typer.Option(help="Price of an instance for an hour.")] = None,
    weights: Annotated[
        list[float] | None, typer.Option("--lambda", help="Weight of cost against time; repeatable.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Find the cheapest plan whose step takes at most this long, such as 90s.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Find the fastest plan whose step costs at most this much.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    settings: Settings = None,
) -> None:
    """Forecast a step before paying for it: actors, seconds, money, the Pareto front and the lower bound."""
    from rlhfless_operator.console import print_tables
    from rlhfless_operator.simulator.forecast import WEIGHTS
    from rlhfless_operator.simulator.hardware import look_around
    from rlhfless_operator.simulator.job_forecast import forecast_job
    from rlhfless_operator.simulator.plan_view import view
    from rlhfless_operator.simulator.question import Question
    from rlhfless_operator.training.costs.hub import fetched_config

    job = load_job(job_file, files=False, settings=settings or ()).resolve_paths(job_file.parent)
    question = Question(
        gpu=gpu,
        gpus=gpus,
        model=model,
        trace=trace,
        acceptance=acceptance,
        median_tokens=median_tokens,
        startup_seconds=_parsed("startup", startup, parse_duration),
        instance_hour=_parsed("instance_hour", instance_hour, parse_money),
        weights=weights or sorted({*WEIGHTS, job.spec.planning.cost_weight}),
        deadline=_parsed("deadline", deadline, parse_duration),
        budget=_parsed("budget", budget, parse_money),
    )
    found = forecast_job(job, question, look_around(os.environ, _products_of_nodes), fetched_config)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        print_tables(view(found))


def _products_of_nodes() -> list[str]:
    """List the GPU products of the cluster's nodes; empty if there is no cluster or no Kubernetes client."""
    if importlib.util.find_spec("kubernetes") is None:
        return []
    from rlhfless_operator.controller.nodes import products_of_nodes

    return products_of_nodes()


def _parsed(option: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    """Read the value of an option, such as `90s` or `2.50`; None if it is not given.

    Raises:
        ValueError: naming the option.
    """
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
