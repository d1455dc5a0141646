"""Files with the suffix .pt2: networks saved by ``torch.export``.

PyTorch is imported with the first file, not with this module: a plan asks which kinds there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beam_inference.models.loading import ModelLoader


def load_file(path: Path, *, allow_pickle: bool) -> Any:
    """Load the program of a ``torch.export`` file.

    Raises:
        ModelContractError: it is none, or could run code of its own while ``allow_pickle`` is not
            given.
    """
    from beam_inference.models import exported_file

    return exported_file.load_file(path, allow_pickle=allow_pickle)


LOADER = ModelLoader(load=load_file)
