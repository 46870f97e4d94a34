"""`rlhfless operator`: run the jobs of a cluster."""

import asyncio
import os
from typing import Annotated, Literal

import typer

from rlhfless_operator.commands.exits import fail


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
            fail("--leader-elect outside a cluster needs the Lease's namespace; give --lease-namespace")
        election = Election(namespace, lease_name) if elect and namespace else None
        configure_logs(log_format, verbose=verbose)
        asyncio.run(Operator(settings, knative_platforms, election=election).run())
    except LeadershipLostError as error:
        fail(str(error))
