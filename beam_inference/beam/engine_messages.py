"""What errors of Flink, Spark and Beam's Java code mean, and what to do about them."""

from __future__ import annotations

import re

from beam_inference.beam.job_server import message_of_log
from beam_inference.foreign_text import clean_text

_MEANINGS = (
    (
        r"No module named '?beam_inference",
        "the engine's workers lack the package beam-inference. Start worker pools in an "
        "environment that has it, or name an image with it (--environment_config)",
    ),
    (
        r"finishConnect\(\.\.\) failed: (?P<why>[\w ]+)",
        "a worker pool does not answer where --environment_config says, as one of the engine's "
        "hosts sees it ({why}). Start one on each host of a TaskManager or executor: "
        "python -m apache_beam.runners.worker.worker_pool_main --service_port=50000",
    ),
    (
        r"docker: Cannot connect|Cannot run program \"docker\"|docker: (?:not found|command)",
        "the engine's hosts would start workers by Docker, which does not answer there. Start "
        "worker pools on them: --environment_type=EXTERNAL --environment_config=localhost:50000",
    ),
    (
        r"No client connected within timeout|TimeoutException: Timed out while waiting for",
        "no worker process connected in time. See the log of the worker pool on the engine's "
        "hosts; each TaskManager needs a pool of its own (--environment_config)",
    ),
    (
        r"NoResourceAvailableException|Could not acquire the minimum required resources",
        "the Flink cluster had too few free slots for too long (slot.request.timeout). Run the "
        "job again with a smaller --parallelism, or with more TaskManagers",
    ),
    (
        r"NoRestartBackoffTimeStrategy",
        "a worker was lost, and the Flink cluster has no restart strategy. Set "
        "restart-strategy.type: fixed-delay in its configuration; run again for what is missing",
    ),
    (
        r"CANCELLED: (?:client cancelled|call already cancelled)|Runner closed connection",
        "a worker process was lost: killed, out of memory, or no longer reached. See the log of "
        "the worker pool on its host",
    ),
    (
        r"failed in state CANCELLED|JobCancell?edException|JobCancellationException|"
        r"Job was cancelled",
        "the job was cancelled on its engine, not by this launch. Run again to do what is missing",
    ),
)


_OWN = re.compile(r"beam_inference(?:\.\w+)+: (.+)")
_STEP = re.compile(r"\s*\[?while running '[^']*'\]?")


def explain_text(text: str) -> str:
    """Return one line that tells why a runner failed; empty if it said nothing.

    Args:
        text: what it raised, which may hold the stacks of Python's and Java's exceptions.
    """
    own = find_own_messages(text)
    message = own[-1] if own else translate(text) or _last_line(text)
    return clean_text(without_step(message))


def find_own_messages(text: str) -> list[str]:
    """Return the messages of our own errors in a text that holds stacks of Python."""
    return _OWN.findall(text)


def without_step(message: str) -> str:
    """Return a message without the step of the pipeline that Beam adds to it."""
    return _STEP.sub("", message)


def _last_line(text: str) -> str:
    """The last line of a text; with the one before, where it is no more than an address."""
    *before, last = text.splitlines() or [""]
    return f"{before[-1].strip()} {last}" if before and last.startswith("http") else last


def translate(text: str) -> str | None:
    """Say what an error of an engine means; None if it is no error of one, or nothing is known.

    Args:
        text: what the runner raised, which may hold the stack of a Java exception.
    """
    for pattern, meaning in _MEANINGS:
        if found := re.search(pattern, text):
            return meaning.format(**found.groupdict())
    if "\tat " in text or "java.base/" in text:
        return message_of_log(text.splitlines())
    if found := re.match(r"Pipeline \S+ failed in state [A-Z]+: (.+)", text, re.DOTALL):
        return message_of_log(found[1].splitlines())
    return None
