"""The address of an environment's server in tasks: the job's document has none where the job runs the server."""

from rlhfless_functions.api import GenerationRequest, MaterializeRequest, RunRequest


def needs_server(request: RunRequest) -> bool:
    """Return whether a task talks to a server that the job runs."""
    if not isinstance(request, GenerationRequest | MaterializeRequest):
        return False
    return request.environment is not None and request.environment.server is not None


def addressed(request: RunRequest, url: str) -> RunRequest:
    """Return a task that `needs_server`, with the server's address."""
    assert isinstance(request, GenerationRequest | MaterializeRequest) and request.environment is not None
    return request.model_copy(update={"environment": request.environment.at(url)})
