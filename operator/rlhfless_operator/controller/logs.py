"""The operator's log: one line an occurrence, as JSON for a log collector or as text for people."""

import logging
from typing import Literal

import kopf

LogFormat = Literal["json", "text"]

NOTICE = "notice"
"""Id of the handler that kopf calls for each event of each job."""


def configure_logs(log_format: LogFormat, *, verbose: bool = False) -> None:
    """Log to standard error from now on.

    Args:
        verbose: also say what helps to find a fault in the operator itself.
    """
    kopf.configure(
        verbose=verbose,
        log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL,
        log_refkey="object",
    )
    if not verbose:
        logging.getLogger("kopf.objects").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    """kopf says of every single event that its handler succeeded."""
    return record.levelno > logging.INFO or f"'{NOTICE}' succeeded" not in record.getMessage()
