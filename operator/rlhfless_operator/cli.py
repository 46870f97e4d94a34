"""The command line, `rlhfless`: the commands with their options."""

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
from rlhfless_operator.job.reading.validation import InvalidJobError, load_job
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
        "--set", metavar="PATH=VALUE", help="Override a value of the document, such as spec.steps=5; repeatable."
    ),
]


def main() -> None:
    """Entry point. An error prints one line to standard error and exits with 1; an invalid job document exits with
    2."""
    try:
        app()
    except InvalidJobError as error:
        _fail(str(error), status=2)
    except (artifacts.ArtifactError, UserError, ValueError) as error:
        _fail(str(error))


@app.command()
def run(
    job_file: JobFile,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the job's outputs and start over.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
    artifacts_uri: Annotated[str | None, typer.Option("--artifacts", help="Instead of spec.artifacts.uri.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads for all instances; all cores by default.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Train on this machine. Running it again resumes an interrupted job.

    The exit status is 3 if the next step would exceed spec.budget.
    """
    from rlhfless_operator.local.local_run import JobFinishedError, RunOptions, run_locally
    from rlhfless_operator.training.journal.budget import BudgetExhaustedError

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
        _fail("stopped; run the same command to resume", status=128 + signal.SIGINT)
    except BudgetExhaustedError as error:
        _fail(f"suspended: {error}; run the same command to resume", status=3)
    except UserError as error:
        _fail(str(error))


@app.command()
def validate(job_file: JobFile, settings: Settings = None) -> None:
    """Check a job document and its files, and print each fault with its field, line and remedy."""
    from rlhfless_operator.job.reading.experimental import experimental_options
    from rlhfless_operator.job.reading.file_contents import not_checked

    job = load_job(job_file, packages=True, settings=settings or ())
    typer.echo(f"{job_file}: {job.metadata.name} is a valid job")
    for line in not_checked(job, job_file.parent):
        typer.echo(f"  not checked: {line}")
    for option in experimental_options(job.spec):
        typer.echo(f"  experimental: {option} — off by default, and no gain on GPUs or a real cluster is shown yet")


@app.command()
def convert(
    configuration: Annotated[Path, typer.Argument(help="TRL's GRPO or verl's configuration: YAML, or a script.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the job into this file.")] = None,
    peer: Annotated[
        Literal["trl", "verl"] | None,
        typer.Option("--from", help="Framework of the configuration; detected by default."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that TRL runs with, which its batch size depends on.")
    ] = 1,
) -> None:
    """Convert a configuration of TRL or verl to a job, and report each field that was converted or left out."""
    from rlhfless_operator.convert import convert_trl, convert_verl, job_yaml, read_configuration, table

    whose, given = read_configuration(configuration, peer)
    name = configuration.name
    conversion = convert_trl(given, name, processes) if whose == "trl" else convert_verl(given, name)
    text = job_yaml(conversion)
    if output is None:
        typer.echo(text, nl=False)
    else:
        if output.exists():
            _fail(f"{output} already exists; name another file")
        output.write_text(text, encoding="utf-8")
    typer.echo(table(conversion), err=True)


@app.command("try-reward")
def try_reward(
    job_file: JobFile,
    responses: Annotated[
        Path | None,
        typer.Option(help='Responses to score: JSONL of {"response": …} with "row" or "prompt", or lines of text.'),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Without responses: number of prompts to answer.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Without responses: number of answers to each prompt.")] = 4,
    row: Annotated[
        int | None,
        typer.Option(min=0, help="Row of the prompt for responses that name none; by default one row after the other."),
    ] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Use the evaluation's data and rewards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    settings: Settings = None,
) -> None:
    """Score given responses, or responses that the model samples, without training.

    The exit status is 1 if a reward fails, or if no response has a reward.
    """
    from rlhfless_operator.console import print_tables
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
        print_tables(trials.view(result))
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
    from rlhfless_operator.simulator.plan_command import Question, duration_of, forecast_job, money_of
    from rlhfless_operator.simulator.plan_view import view
    from rlhfless_operator.training.costs.hub import fetched_config

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
        print_tables(view(found))


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
        float | None, typer.Option(help="Let all policies draft; the probability that a drafted token is right.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with plots to this file.")] = None,
    asynchronous: Annotated[
        bool, typer.Option("--async", help="Compare asynchronous systems, each beside synchronous steps.")
    ] = False,
) -> None:
    """Compare planning policies on simulated GPUs."""
    from rlhfless_operator.console import print_tables
    from rlhfless_operator.simulator.asynchronous.compare import table as async_table
    from rlhfless_operator.simulator.command import Assumptions, run_async_command, run_command
    from rlhfless_operator.simulator.simulate import table

    assumptions = Assumptions(model, gpu, gpus, tensor_parallel, gpu_hour, cost_weight, acceptance)
    if asynchronous:
        if html is not None:
            _fail("--html is given with --async, of which there is no page; leave one of them out")
        result = run_async_command(scenario, trace, assumptions, range(seeds))
    else:
        result = run_command(scenario, trace, assumptions, range(seeds), html)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        print_tables(async_table(result) if asynchronous else table(result))


@app.command()
def preflight(
    job_file: Annotated[Path | None, typer.Argument(help="Also check what this job needs.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of jobs, to check its quotas; by default the job's.")
    ] = None,
    knative_namespace: Annotated[str | None, typer.Option(help="Instead of RLHFLESS_KNATIVE_NAMESPACE.")] = None,
    artifacts_uri: Annotated[str | None, typer.Option("--artifacts", help="Instead of RLHFLESS_ARTIFACTS.")] = None,
    service_account: Annotated[
        str | None, typer.Option(help="NAMESPACE/NAME of the operator's account, to check its permissions, not yours.")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Show the needed changes of Knative, ask, and apply them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before changing anything.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    settings: Settings = None,
) -> None:
    """Check that a cluster can run jobs, and print remedies. The operator's settings come from RLHFLESS_* variables.

    The exit status is 1 if a problem keeps jobs from running.
    """
    if importlib.util.find_spec("kubernetes") is None:
        _fail("the Kubernetes client is not installed; pip install 'rlhfless[operator]'")
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
        _fail("--yes works only with --fix; give both")
    if fix and as_json:
        _fail("--fix can't be combined with --json; remove --json")

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
        _fail(f"no cluster is configured: {error}; set KUBECONFIG")
    except (UserError, UnavailableError) as error:
        _fail(str(error))
    typer.echo(json.dumps([vars(finding) for finding in findings]) if as_json else checks.describe(findings))
    raise typer.Exit(int(checks.failed(findings)))


@app.command()
def operator(
    leader_elect: Annotated[
        bool | None,
        typer.Option(help="Elect one of several replicas by a Lease; by default only inside a cluster."),
    ] = None,
    lease_namespace: Annotated[str | None, typer.Option(help="Namespace of the Lease; by default the pod's.")] = None,
    lease_name: Annotated[str, typer.Option(help="Of the Lease.")] = "rlhfless-operator",
    log_format: Annotated[
        Literal["json", "text"], typer.Option(help="JSON for log collectors, or text for people.")
    ] = "json",
    verbose: Annotated[bool, typer.Option(help="Also log details for debugging the operator.")] = False,
) -> None:
    """Run the jobs of a cluster: the one in KUBECONFIG, or the one that this process runs in.

    Settings are environment variables such as RLHFLESS_FUNCTIONS_IMAGE; the Helm chart sets them.
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
            _fail("--leader-elect outside a cluster needs the Lease's namespace; give --lease-namespace")
        election = Election(namespace, lease_name) if elect and namespace else None
        configure_logs(log_format, verbose=verbose)
        asyncio.run(Operator(settings, knative_platforms, election=election).run())
    except (UserError, LeadershipLostError) as error:
        _fail(str(error))


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition of RLHFJob."""
    from rlhfless_operator.job.generated.crd import crd_yaml

    typer.echo(crd_yaml(), nl=False)


@app.command()
def reference() -> None:
    """Print the reference of every field of a job document, in Markdown."""
    from rlhfless_operator.job.generated.reference import reference_markdown

    typer.echo(reference_markdown(), nl=False)


def _products_of_nodes() -> list[str]:
    """GPU products of the cluster's nodes; empty if there is no cluster or no Kubernetes client."""
    if importlib.util.find_spec("kubernetes") is None:
        return []
    from rlhfless_operator.controller.nodes import products_of_nodes

    return products_of_nodes()


def _fail(message: str, status: int = 1) -> NoReturn:
    typer.echo(f"error: {message}" if status != 2 else message, err=True)
    raise SystemExit(status)
