"""Pickled Python, which can run any code as it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beam_inference.errors import ModelContractError

ALLOW_HINT = "If you trust it, pass --allow_pickle."


def unpickle(path: Path) -> Any:
    """Load a file of :func:`torch.save`, and run what code it carries.

    Raises:
        ModelContractError: it cannot be loaded.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise ModelContractError(
            f"cannot unpickle {path}: {type(error).__name__}: {error}"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
