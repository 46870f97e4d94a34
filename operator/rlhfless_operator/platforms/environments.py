"""The address of an environment's server in tasks: the job's document has none where the job runs the server."""

from rlhfless_functions.api import GenerationRequest, Join, Line, MaterializeRequest, RunRequest
from rlhfless_operator.platforms.live_request import LiveRequest


def needs_server(request: RunRequest) -> bool:
    """Return whether a task talks to a server that the job runs."""
    if not isinstance(request, GenerationRequest | MaterializeRequest):
        return False
    return request.environment is not None and request.environment.server is not None


def addressed(request: RunRequest, url: str) -> RunRequest:
    """Return a task that `needs_server`, with the server's address, as have the shares that join it later."""
    assert isinstance(request, GenerationRequest | MaterializeRequest) and request.environment is not None
    found = request.model_copy(update={"environment": request.environment.at(url)})
    if not isinstance(found, LiveRequest):
        return found

    def changed(line: Line) -> Line:
        if not isinstance(line, Join) or not needs_server(line.request):
            return line
        return line.model_copy(update={"request": addressed(line.request, url)})

    return found.with_lines(changed)
