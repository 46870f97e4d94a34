"""The operator's log: one line per event, as JSON for a log collector or as text for people."""

import logging
from typing import Literal

import kopf

LogFormat = Literal["json", "text"]

NOTICE = "notice"
"""Id of the handler that kopf calls for each event of each job."""


def configure_logs(log_format: LogFormat, *, verbose: bool = False) -> None:
    """Log to standard error.

    Args:
        verbose: also log details for debugging the operator.
    """
    kopf.configure(
        verbose=verbose,
        log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL,
        log_refkey="object",
    )
    if not verbose:
        logging.getLogger("kopf.objects").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    """Drop kopf's message that a handler succeeded, which it logs for every event."""
    return record.levelno > logging.INFO or f"'{NOTICE}' succeeded" not in record.getMessage()
