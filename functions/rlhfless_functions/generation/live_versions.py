"""The samples and weights versions that go together in a live batch: no response mixes versions in another order than
they came."""

from rlhfless_functions.api import GenerationRequest
from rlhfless_functions.runtime.task import TaskError


def check_joins(request: GenerationRequest, version: int) -> None:
    """Refuse samples that keep to one version of the weights, if the batch has another one.

    Raises:
        TaskError: `bad_request`.
    """
    if request.oldest_version is None and request.weights.version != version:
        raise TaskError(
            "bad_request",
            f"live: samples of weights version {request.weights.version} can't join a batch of version {version}; send"
            " a weights line before, or set oldest_version",
        )


def check_goes_on(responses: int, before: int, after: int) -> None:
    """Refuse an older version of the weights for responses that have begun.

    Args:
        responses: their number.
        before: version that has sampled them.
        after: version to go on with.

    Raises:
        TaskError: `bad_request`.
    """
    if responses and after < before:
        raise TaskError(
            "bad_request",
            f"live: responses of weights version {before} can't go on with version {after}, which is older; let them"
            " leave the batch first",
        )
