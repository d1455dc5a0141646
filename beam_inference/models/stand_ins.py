"""What stands where the file of a network should be: nothing, a pointer of Git LFS, a web page."""

from __future__ import annotations

from pathlib import Path

from beam_inference.errors import ModelContractError
from beam_inference.models.archive import is_archive

_LFS = b"version https://git-lfs.github.com/spec/"
_WEB_PAGES = (b"<!doctype html", b"<html")
_HEAD_BYTES = 512
_PICKLE = b"\x80"
"""The first byte of a pickle, but of the oldest forms, which PyTorch never wrote."""


def check_no_stand_in(path: Path) -> None:
    """Refuse what is no network or weights of any kind.

    Args:
        path: of a file.

    Raises:
        ModelContractError: it is empty, a pointer of Git LFS, or a web page.
    """
    head = _read_head(path)
    if not head:
        raise ModelContractError(f"{path} is empty. Save or copy it again.")
    if head.startswith(_LFS):
        raise ModelContractError(
            f"{path} is a pointer of Git LFS, in place of the file itself: get that by git lfs pull"
        )
    if head.lstrip().lower().startswith(_WEB_PAGES):
        raise ModelContractError(f"{path} is a web page, not the file. Download that again.")


def check_saved_by_torch(path: Path) -> None:
    """Refuse a file that does not begin as those of :func:`torch.save` and TorchScript do.

    Raises:
        ModelContractError: it does not.
    """
    check_no_stand_in(path)
    if not is_archive(path) and not _read_head(path).startswith(_PICKLE):
        raise ModelContractError(
            f"{path} is no file that PyTorch has saved, or damaged. Save or copy it again."
        )


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
