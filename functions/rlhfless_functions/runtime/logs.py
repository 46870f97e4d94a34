"""Structured logs: one JSON object per line on standard error; a task's lines have job, step, stage and attempt."""

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra={"fields": {...}}` adds its items."""

    def __init__(self, **constant: str) -> None:
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        milliseconds = int(record.msecs)
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **self._constant,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(**constant: str) -> None:
    """Send all logs to standard error as JSON; every line has the `constant` items."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(**constant))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("uvicorn", "httpx", "botocore", "aiobotocore", "s3fs"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
