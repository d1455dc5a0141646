"""What a command logs, and how: plain lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import copy
import logging
import sys

from pythonjsonlogger.json import JsonFormatter

from beam_inference.foreign_text import clean_text


def configure(*, debug: bool, structured: bool) -> None:
    """Log to standard error.

    Plain lines are warnings; everything with ``debug``. ``structured`` lines are JSON objects with
    time, level, logger and message, and, where a message is about one, ``job`` (its fingerprint),
    ``launch``, ``run`` (its first chunk), ``chunk``, ``stage`` and ``attempt``; progress and every
    finished run are among them.
    """
    handler = logging.StreamHandler(sys.stderr)
    if structured:
        fields = {"asctime": "time", "levelname": "level", "name": "logger"}
        formatter: logging.Formatter = _StructuredFormatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields=fields,
            datefmt="%Y-%m-%dT%H:%M:%S%z",
        )
    else:
        formatter = _PlainFormatter("%(levelname)s: %(message)s")
    handler.setFormatter(formatter)
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(handler)
    elif structured:
        root.handlers[:] = [handler]  # a line that is no JSON would break its reader
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    logging.getLogger("beam_inference").setLevel(
        logging.DEBUG if debug else logging.INFO if structured else logging.NOTSET
    )
    # Beam logs every exception with its stack, at each level it passes; the message is told once,
    # by us.
    logging.getLogger("apache_beam").setLevel(logging.INFO if debug else logging.CRITICAL)


class _PlainFormatter(logging.Formatter):
    """Lines for people, clean."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_clean_record(record))


class _StructuredFormatter(JsonFormatter):
    """Lines for machines, clean."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_clean_record(record))


def _clean_record(record: logging.LogRecord) -> logging.LogRecord:
    """A copy of a log record whose message and stack trace are clean."""
    clean = copy.copy(record)
    clean.msg = clean_text(record.getMessage())
    clean.args = ()
    if record.exc_info:
        clean.exc_text = clean_text(logging.Formatter().formatException(record.exc_info))
        clean.exc_info = None
    return clean
