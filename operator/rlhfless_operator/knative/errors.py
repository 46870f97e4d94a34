"""Errors of the API server."""

import json
from typing import Any


class ApiError(Exception):
    """An answer with an error status.

    Args:
        status: HTTP status; 0 if there was no answer.
        reason: the API server's reason, such as `NotFound` or `Invalid`.
        message: the API server's message.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status = status
        self.reason = reason
        self.message = message


class NotFoundError(ApiError):
    """There is no such object, or no such kind (its CRD is not installed)."""


class ConflictError(ApiError):
    """The object already exists, or has changed since it was read."""


class GoneError(ApiError):
    """The resource version is too old to watch from."""


class ForbiddenError(ApiError):
    """A role is missing, or an admission plugin such as a quota refuses."""


class InvalidError(ApiError):
    """The object breaks its schema, or an admission webhook refuses it."""


class UnavailableError(ApiError):
    """The API server can't be reached, or can't answer now. It may still have carried out the request."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidError,
    403: ForbiddenError,
    404: NotFoundError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: UnavailableError,
}


def error_of(status: int, body: bytes) -> ApiError:
    """Convert an answer to an error.

    Args:
        status: HTTP status, 400 or more.
        body: a Kubernetes `Status` as JSON, or any other text.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        answer = {"message": body.decode(errors="replace")[:500]}
    return error_of_status({"code": status, **answer})


def error_of_status(answer: dict[str, Any]) -> ApiError:
    """Convert a Kubernetes `Status` object to an error."""
    status = int(answer.get("code") or 0)
    reason = str(answer.get("reason") or "Unknown")
    message = str(answer.get("message") or "no message")
    kind = _BY_STATUS.get(status, UnavailableError if status >= 500 else ApiError)
    if "failed to create typed patch object" in message:
        # The kind's schema lacks a field; server-side apply reports this as an internal error.
        kind = InvalidError
    return kind(status, reason, message)
