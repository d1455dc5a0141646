"""A file as it is when it is judged, which nobody else can exchange before it is loaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from beam_inference.errors import ModelContractError


@contextmanager
def own_copy(path: Path) -> Iterator[Path]:
    """A copy of a file in a folder of this process alone, as long as the context lasts.

    Messages of errors name the file itself.

    Args:
        path: of the file.

    Yields:
        The copy, of the same name.

    Raises:
        ModelContractError: the file cannot be copied; or whatever is raised in the context.
    """
    with tempfile.TemporaryDirectory(prefix="beam-inference-model-") as folder:
        copy = Path(folder) / path.name
        try:
            shutil.copyfile(path, copy)
        except OSError as error:
            raise ModelContractError(
                f"{path} cannot be copied to {folder}, to be judged there: {error.strerror}. Set "
                "TMPDIR to a folder with more space."
            ) from None
        try:
            yield copy
        except ModelContractError as error:
            raise ModelContractError(str(error).replace(str(copy), str(path))) from None
