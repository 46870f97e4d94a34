"""`rlhfless simulate`: compare planning policies on simulated GPUs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rlhfless_operator.commands.exits import fail


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario, such as paper-3b-gsm8k-grpo; with --trace, its assumptions.")
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Replay a run: its folder, or a trace in Parquet.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
    model: Annotated[str | None, typer.Option(help="Model folder or name, instead of the scenario's.")] = None,
    gpu: Annotated[str | None, typer.Option(help="H100, H200, A100 or L40S, instead of the scenario's.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the cluster, instead of the scenario's.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="GPUs of an instance, instead of the scenario's.")] = None,
    gpu_hour: Annotated[float | None, typer.Option(min=0, help="Price of a GPU for an hour, in dollars.")] = None,
    cost_weight: Annotated[float | None, typer.Option("--lambda", help="Weight of cost against time.")] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Let all policies draft; the probability that a drafted token is right.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Starts of instances: slots (the default), pods or processes.")
    ] = None,
    added: Annotated[
        list[str] | None,
        typer.Option("--with", help="Also ours with what the loop lacks by default: holding or publishing."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots to this file.")] = None,
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Compare asynchronous systems, each beside synchronous steps.")
    ] = False,
) -> None:
    """Compare planning policies on simulated GPUs."""
    from rlhfless_operator.console import print_tables, progress_bar
    from rlhfless_operator.simulator import page, policies
    from rlhfless_operator.simulator import simulate as steps
    from rlhfless_operator.simulator.assumptions import Assumptions, assumed_scenario
    from rlhfless_operator.simulator.asynchronous import compare, systems

    if asynchronous and html is not None:
        fail("--html is given with --async, of which there is no page; leave one of them out")
    if asynchronous and added:
        fail("--with is given with --async, which has no such abilities; leave one of them out")
    chosen = [*policies.POLICIES, *(["+".join(("rlhfless", *added))] if added else [])]
    assumptions = Assumptions(model, gpu, gpus, tensor_parallel, gpu_hour, cost_weight, acceptance, platform)
    found, lengths = assumed_scenario(scenario, trace, assumptions)
    if asynchronous:
        with progress_bar("simulating", len(compare.SYNCHRONOUS) + len(systems.SYSTEMS)) as advance:
            result = compare.compare(found, range(seeds), trace=lengths, progress=lambda name: advance())
    else:
        runs = 1 + (1 + len(page.WEIGHTS) / len(chosen) if html is not None else 0)
        total = round(steps.step_count(found, lengths) * seeds * len(chosen) * runs)
        with progress_bar("simulating", total) as advance:

            def progress(done: int, wanted: int) -> None:
                advance()

            result = steps.simulate(found, range(seeds), policies=chosen, trace=lengths, progress=progress)
            if html is not None:
                drawn = page.scenario_page(found, range(seeds), trace=lengths, result=result, progress=progress)
                html.write_text(drawn)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        print_tables(compare.table(result) if asynchronous else steps.table(result))
