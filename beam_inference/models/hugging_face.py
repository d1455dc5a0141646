"""Packages of networks on Hugging Face: ``hf://organisation/repository[@revision]``."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error, shorten_text

logger = logging.getLogger(__name__)

SCHEME = "hf://"
_ADDRESS = re.compile(
    r"hf://(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")

_FILES = [
    *("*.json", "*.yaml", "*.yml"),
    *("*.pt", "*.pth", "*.pt2", "*.ts", "*.onnx", "*.safetensors"),
    *("*.npy", "*.py"),
]
"""Files of packages of networks; training data and pictures are left where they are."""


@dataclass(frozen=True, slots=True)
class Repository:
    """An address on Hugging Face.

    Attributes:
        name: organisation and repository.
        revision: a commit, branch or tag; None for the main branch.
    """

    name: str
    revision: str | None

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, whose files never change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> str:
        """The address of one commit."""
        return f"{SCHEME}{self.name}@{commit}"


def parse_address(path: str) -> Repository:
    """Read an address.

    Raises:
        ModelContractError: it is none.
    """
    match = _ADDRESS.fullmatch(path)
    if match is None or ".." in path:  # which would lead out of the folder where files are kept
        raise ModelContractError(
            f"model.path {shorten_text(path)}: expected hf://organisation/repository, or with "
            "@revision at its end"
        )
    return Repository(match["repository"], match["revision"])


@contextmanager
def _without_its_log() -> Iterator[None]:
    """Keep the library from writing addresses, with all their credentials, to the terminal."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@cache
def fetch_repository(path: str) -> Path:
    """The local folder of a repository at its revision; it is fetched unless it was before.

    Files are kept where ``huggingface_hub`` keeps them (``HF_HOME``), by commit.

    Returns:
        A folder that is named by the commit.

    Raises:
        ModelContractError: it is absent, or cannot be fetched.
    """
    repository = parse_address(path)
    try:
        from huggingface_hub import constants, snapshot_download

        from beam_inference.models.hub_client import bound_answers
    except ImportError as error:
        raise ModelContractError(
            f"model.path {path} needs the package huggingface-hub ({error}): pip install "
            "'beam-inference[huggingface]', here and on the workers; or name a local folder"
        ) from None
    try:
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        bound_answers(cache)
        with _without_its_log():
            folder = snapshot_download(
                repository.name,
                revision=repository.revision,
                cache_dir=cache,
                allow_patterns=_FILES,
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
    except Exception as error:  # of the library, or of the connection
        reason = str(error) if isinstance(error, ModelContractError) else describe_error(error)
        raise ModelContractError(
            f"model.path {path} cannot be fetched: {reason}. A local folder does the same."
        ) from None
    if not repository.is_pinned:
        logger.warning(
            "model.path %s is what lies there now: write %s to keep it",
            path,
            repository.at(Path(folder).name),
        )
    return Path(folder)
