"""The command line, `rlhfless`: what each command is given, and whom it asks."""

import asyncio
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.validation import InvalidJobError, load_job
from rlhfless_operator.local.probe_command import probe
from rlhfless_operator.local.run_commands import compare, replay, report, sample

app = typer.Typer(
    help="Serverless RLHF: train a language model by RL, with GPUs held only while they work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

JobFile = Annotated[Path, typer.Argument(help="The job document (YAML).")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="A value of the document, such as spec.steps=5; several may be given."
    ),
]


def main() -> None:
    """Entry point. A fault is one line on standard error and exit status 1; a bad job document exits with 2."""
    try:
        app()
    except InvalidJobError as error:
        _fail(str(error), status=2)
    except (artifacts.ArtifactError, UserError, ValueError) as error:
        _fail(str(error))


@app.command()
def run(
    job_file: JobFile,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: delete what the job has made so far.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
    artifacts_uri: Annotated[str | None, typer.Option("--artifacts", help="Instead of spec.artifacts.uri.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads to share out; all cores if left out.")] = None,
    settings: Settings = None,
) -> None:
    """Train on this machine. A job that was interrupted goes on; one that is finished says so.

    The exit status is 3 if the next step would take the job past spec.budget.
    """
    from rlhfless_operator.local.local_run import JobFinishedError, RunOptions, run_locally
    from rlhfless_operator.training.budget import BudgetExhaustedError

    job = load_job(job_file, packages=True, settings=settings or ()).resolve_paths(job_file.parent)
    root = artifacts.join(artifacts_uri or job.spec.artifacts.uri, job.metadata.name)
    if fresh and artifacts.list_files(root):
        if not yes:
            typer.confirm(f"Delete everything in {root} and start over?", abort=True)
        artifacts.remove(root)
    try:
        asyncio.run(run_locally(job, root, RunOptions(threads=threads or len(os.sched_getaffinity(0)))))
    except JobFinishedError as error:
        typer.echo(str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail("stopped; the same command goes on from here", status=128 + signal.SIGINT)
    except BudgetExhaustedError as error:
        _fail(f"suspended: {error}; the same command goes on from here", status=3)
    except UserError as error:
        _fail(str(error))


@app.command()
def validate(job_file: JobFile, settings: Settings = None) -> None:
    """Say everything that is wrong with a job document, and with the files that it names: field, line and remedy."""
    from rlhfless_operator.job.file_contents import not_checked

    job = load_job(job_file, packages=True, settings=settings or ())
    typer.echo(f"{job_file}: {job.metadata.name} is a valid job")
    for line in not_checked(job, job_file.parent):
        typer.echo(f"  not checked: {line}")


@app.command()
def convert(
    configuration: Annotated[Path, typer.Argument(help="TRL's GRPO or verl's configuration: YAML, or a script.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the job into this file.")] = None,
    peer: Annotated[Literal["trl", "verl"] | None, typer.Option("--from", help="Whose; told by its names.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="That TRL is launched with: its batch size depends on it.")] = 1,
) -> None:
    """Write a job that means what a configuration of TRL or verl does; say what each field became, and what is left."""
    from rlhfless_operator.convert import convert_trl, convert_verl, job_yaml, read_configuration, table

    whose, given = read_configuration(configuration, peer)
    name = configuration.name
    conversion = convert_trl(given, name, processes) if whose == "trl" else convert_verl(given, name)
    text = job_yaml(conversion)
    if output is None:
        typer.echo(text, nl=False)
    else:
        if output.exists():
            _fail(f"{output} is there already; name another file")
        output.write_text(text, encoding="utf-8")
    typer.echo(table(conversion), err=True)


@app.command("try-reward")
def try_reward(
    job_file: JobFile,
    responses: Annotated[
        Path | None,
        typer.Option(help='Of these: JSONL of {"response": …} with "row" or "prompt", or lines of text.'),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Else: how many of the first prompts to answer.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Else: how many answers to each.")] = 4,
    row: Annotated[
        int | None,
        typer.Option(min=0, help="Row of the prompt of responses that name none; one after the other if left out."),
    ] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="With the evaluation's data and rewards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    settings: Settings = None,
) -> None:
    """Score given responses, or some that the model samples here, and train nothing.

    The exit status is 1 if a reward fails, or if no response has a reward.
    """
    from rich.console import Console

    from rlhfless_operator.local import try_reward as trials

    job = load_job(job_file, settings=settings or ()).resolve_paths(job_file.parent)
    try:
        trial = trials.make_trial(job, responses, prompts=prompts, samples=samples, row=row, evaluation=evaluation)
        result = trials.run_trial(trial)
    except UserError as error:
        _fail(str(error))
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        Console().print(trials.view(result))
    for fault in (found := trials.faults(result)):
        typer.echo(f"error: {fault}", err=True)
    raise typer.Exit(int(bool(found)))


app.command()(report)
app.command()(compare)
app.command()(replay)
app.command()(sample)
app.command()(probe)


@app.command()
def plan(
    job_file: JobFile,
    gpu: Annotated[
        str | None, typer.Option("--gpu", "--device", help="H100, H200, A100 or L40S; what there is if left out.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", "--tensor-parallel", help="GPUs of an instance, with tensor parallelism.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or name, instead of model.source.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="Lengths of an earlier run: its folder, or a trace in Parquet.")
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Chance that a drafted token is right; what the trace's run had if left out.")
    ] = None,
    median_tokens: Annotated[
        float | None, typer.Option(help="Median response, without a trace; a quarter of the longest if left out.")
    ] = None,
    startup: Annotated[str | None, typer.Option(help="Start-up of an instance, such as 30s.")] = None,
    instance_hour: Annotated[str | None, typer.Option(help="Price of an instance for an hour.")] = None,
    weights: Annotated[
        list[float] | None, typer.Option("--lambda", help="Weight of cost against time; several may be given.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Longest time of a step, such as 90s: the cheapest plan.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Most money for a step: the fastest plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    settings: Settings = None,
) -> None:
    """Forecast a job before paying for it: actors, seconds and money of a step, the front, and the lower bound."""
    from rich.console import Console

    from rlhfless_operator.simulator.forecast import WEIGHTS
    from rlhfless_operator.simulator.hardware import look_around
    from rlhfless_operator.simulator.plan_command import Question, duration_of, forecast_job, money_of, view
    from rlhfless_operator.training.hub import fetched_config

    job = load_job(job_file, settings=settings or ()).resolve_paths(job_file.parent)
    question = Question(
        gpu=gpu,
        gpus=gpus,
        model=model,
        trace=trace,
        acceptance=acceptance,
        median_tokens=median_tokens,
        startup_seconds=duration_of("startup", startup),
        instance_hour=money_of("instance_hour", instance_hour),
        weights=weights or sorted({*WEIGHTS, job.spec.planning.cost_weight}),
        deadline=duration_of("deadline", deadline),
        budget=money_of("budget", budget),
    )
    found = forecast_job(job, question, look_around(os.environ, _products_of_nodes), fetched_config)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        Console().print(view(found))


@app.command()
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
        float | None, typer.Option(help="Everybody drafts, and a drafted token is right with this chance.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots here.")] = None,
) -> None:
    """Compare planning policies with their peers on simulated GPUs."""
    from rich.console import Console

    from rlhfless_operator.simulator.command import Assumptions, run_command
    from rlhfless_operator.simulator.simulate import table

    assumptions = Assumptions(model, gpu, gpus, tensor_parallel, gpu_hour, cost_weight, acceptance)
    result = run_command(scenario, trace, assumptions, range(seeds), html)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        Console().print(table(result))


@app.command()
def preflight(
    job_file: Annotated[Path | None, typer.Argument(help="Also look at what this job needs.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Of jobs, for their quotas; the job's own, or default.")] = None,
    knative_namespace: Annotated[str | None, typer.Option(help="Instead of RLHFLESS_KNATIVE_NAMESPACE.")] = None,
    artifacts_uri: Annotated[str | None, typer.Option("--artifacts", help="Instead of RLHFLESS_ARTIFACTS.")] = None,
    service_account: Annotated[
        str | None, typer.Option(help="NAMESPACE/NAME of the operator, to look at its permissions, not yours.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="First show what to change of Knative, ask, and do it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before changing anything.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    settings: Settings = None,
) -> None:
    """Say what a cluster lacks for jobs to run, and how to set it. Settings are the operator's, from RLHFLESS_*.

    The exit status is 1 if something keeps jobs from running.
    """
    if importlib.util.find_spec("kubernetes") is None:
        _fail("this installation talks to no cluster; pip install 'rlhfless[operator]'")
    from kubernetes.aio.config import ConfigException

    from rlhfless_operator import preflight as checks
    from rlhfless_operator.controller.main import connect
    from rlhfless_operator.knative import UnavailableError
    from rlhfless_operator.platforms.cluster_settings import ClusterSettings

    given = {"RLHFLESS_KNATIVE_NAMESPACE": knative_namespace, "RLHFLESS_ARTIFACTS": artifacts_uri}
    environment = {"RLHFLESS_FUNCTIONS_IMAGE": "rlhfless-functions", **os.environ}
    environment |= {name: value for name, value in given.items() if value is not None}
    job = load_job(job_file, settings=settings or ()) if job_file is not None else None
    if yes and not fix:
        _fail("--yes answers what --fix asks: give that too")
    if fix and as_json:
        _fail("--fix shows its changes to people: leave out --json")

    async def look() -> list[checks.Finding]:
        cluster = ClusterSettings.from_environment(environment)
        async with connect() as client:
            if fix:
                await checks.fix(client, cluster, job=job, say=typer.echo, agrees=lambda: checks.agrees(yes))
            return await checks.preflight(
                client, cluster, job=job, namespace=namespace, service_account=service_account
            )

    try:
        findings = asyncio.run(look())
    except ConfigException as error:
        _fail(f"no cluster is named: {error}; set KUBECONFIG")
    except (UserError, UnavailableError) as error:
        _fail(str(error))
    typer.echo(json.dumps([vars(finding) for finding in findings]) if as_json else checks.describe(findings))
    raise typer.Exit(int(checks.failed(findings)))


@app.command()
def operator(
    leader_elect: Annotated[
        bool | None,
        typer.Option(help="Of several replicas let one lead, by a Lease; if left out, only inside a cluster."),
    ] = None,
    lease_namespace: Annotated[str | None, typer.Option(help="Of the Lease; the pod's own if left out.")] = None,
    lease_name: Annotated[str, typer.Option(help="Of the Lease.")] = "rlhfless-operator",
    log_format: Annotated[Literal["json", "text"], typer.Option(help="For log collectors, or for people.")] = "json",
    verbose: Annotated[bool, typer.Option(help="Also log what helps to find a fault in the operator.")] = False,
) -> None:
    """Run the jobs of a cluster: the one that KUBECONFIG names, or the one that this process is in.

    Settings are environment variables, RLHFLESS_FUNCTIONS_IMAGE and so on; the Helm chart sets them.
    """
    from rlhfless_operator.controller.functions import knative_platforms
    from rlhfless_operator.controller.leadership import Election, LeadershipLostError, own_namespace
    from rlhfless_operator.controller.logs import configure_logs
    from rlhfless_operator.controller.main import Operator
    from rlhfless_operator.platforms.cluster_settings import ClusterSettings

    try:
        settings = ClusterSettings.from_environment(os.environ)
        namespace = lease_namespace or own_namespace()
        elect = namespace is not None if leader_elect is None else leader_elect
        if elect and namespace is None:
            _fail("--leader-elect outside a cluster: say where the Lease is, with --lease-namespace")
        election = Election(namespace, lease_name) if elect and namespace else None
        configure_logs(log_format, verbose=verbose)
        asyncio.run(Operator(settings, knative_platforms, election=election).run())
    except (UserError, LeadershipLostError) as error:
        _fail(str(error))


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition of RLHFJob."""
    from rlhfless_operator.job.crd import crd_yaml

    typer.echo(crd_yaml(), nl=False)


@app.command()
def reference() -> None:
    """Print the reference of every field of a job document, in Markdown."""
    from rlhfless_operator.job.reference import reference_markdown

    typer.echo(reference_markdown(), nl=False)


def _products_of_nodes() -> list[str]:
    """What the nodes of a cluster have, where this installation talks to one."""
    if importlib.util.find_spec("kubernetes") is None:
        return []
    from rlhfless_operator.controller.nodes import products_of_nodes

    return products_of_nodes()


def _fail(message: str, status: int = 1) -> NoReturn:
    typer.echo(f"error: {message}" if status != 2 else message, err=True)
    raise SystemExit(status)
