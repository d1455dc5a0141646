"""A training's course as TensorBoard shows it: losses, learning rate, and planes of a sample."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.foreign_text import describe_error

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_logger = logging.getLogger(__name__)

EVENTS = "tensorboard"
"""Folder of the events, in a training's output."""


class Events:
    """Writes the course of a training; nothing without a writer.

    Args:
        writer: of TensorBoard's files; None where nothing is to be written.
    """

    def __init__(self, writer: SummaryWriter | None) -> None:
        self._writer = writer

    def add_step(self, step: int, loss: float, learning_rate: float) -> None:
        """Add what is known of a step, counted from 1."""
        with self._writing() as writer:
            if writer is not None:
                writer.add_scalar("loss/training", loss, step)
                writer.add_scalar("learning_rate", learning_rate, step)

    def add_validation(self, step: int, loss: float, planes: Mapping[str, AnyArray]) -> None:
        """Add a validation after some steps.

        Args:
            step: after which.
            loss: of the validation.
            planes: sections of a sample (Y, X), by name.
        """
        with self._writing() as writer:
            if writer is None:
                return
            writer.add_scalar("loss/validation", loss, step)
            for name, plane in planes.items():
                picture = _as_picture(plane)
                writer.add_image(f"sample/{name}", picture, step, dataformats="HW")
            writer.flush()

    def close(self) -> None:
        """Write what is left."""
        with self._writing() as writer:
            if writer is not None:
                writer.close()

    @contextmanager
    def _writing(self) -> Iterator[SummaryWriter | None]:
        """The writer; where it fails, as on a full disk, nothing is written from then on."""
        try:
            yield self._writer
        except OSError as error:
            self._writer = None
            _logger.warning(
                "events for TensorBoard cannot be written any more: %s. Losses are in metrics.json "
                "all the same.",
                describe_error(error),
            )


def _as_picture(plane: AnyArray) -> AnyArray:
    """A plane in 0 to 1: as it is if it is in there, else stretched."""
    low = min(0.0, float(plane.min()))
    high = max(1.0, float(plane.max()))
    return (plane.astype(np.float32) - low) / (high - low)


@contextmanager
def open_events(output: Path, step: int, is_writing: bool) -> Iterator[Events]:
    """Open the events of a training, and close them in the end.

    Args:
        output: folder of the training.
        step: steps that are done. TensorBoard forgets what an earlier launch wrote of later ones.
        is_writing: whether this process is the one that writes. Without TensorBoard none does.
    """
    if not is_writing or find_spec("tensorboard") is None:
        yield Events(None)
        return
    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(output / EVENTS), purge_step=step + 1)
    except Exception as error:  # TensorBoard's own, and those of what it imports
        _logger.warning(
            "TensorBoard is installed, but cannot be used (%s): this training writes no events "
            "for it. Losses are in metrics.json all the same.",
            describe_error(error),
        )
        yield Events(None)
        return
    events = Events(writer)
    try:
        yield events
    finally:
        events.close()
