"""`rlhfless preflight`: check that a cluster can run jobs."""

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from rlhfless_operator.commands.exits import fail
from rlhfless_operator.commands.options import Settings
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.reading.validation import load_job


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
        fail("the Kubernetes client is not installed; in the clone of rlhfless, pip install '.[operator]'")
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
        fail("--yes works only with --fix; give both")
    if fix and as_json:
        fail("--fix can't be combined with --json; remove --json")

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
        fail(f"no cluster is configured: {error}; set KUBECONFIG")
    except (UserError, UnavailableError) as error:
        fail(str(error))
    typer.echo(json.dumps([vars(finding) for finding in findings]) if as_json else checks.describe(findings))
    raise typer.Exit(int(checks.failed(findings)))
