"""Logs of the server on stderr: lines for people, or a JSON object a line."""

import logging
import sys
from datetime import UTC, datetime

import orjson

from bytetx.serve.settings import ServeSettings


def set_up_logs(settings: ServeSettings) -> None:
    """Sends the logs of bytetx and of its HTTP server to stderr, as the settings say."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if settings.json_output else _LineFormatter())
    for name in ("bytetx", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "bytetx" else max(level, logging.WARNING))


class _LineFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")


class _JsonFormatter(logging.Formatter):
    """timestamp, level, target, fields.message: the keys of TEI's JSON logs.

    More fields come as `extra={"fields": {...}}` of a log call.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "target": record.name,
            "fields": {"message": record.getMessage(), **getattr(record, "fields", {})},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()
