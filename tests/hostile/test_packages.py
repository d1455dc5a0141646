"""Packages of networks from strangers: what they bring only computes, and says what it means."""

import warnings
from pathlib import Path

import cellmap_packages
import pytest
import torch

from beam_inference.errors import ModelContractError
from beam_inference.models.packages import open_package


class Saves(torch.nn.Module):
    """Writes a file, as PyTorch's operators can."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        torch.save(batch, self.path)
        return batch


class SavesAtOnce(torch.nn.Module):
    """Writes a file as it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.training = False

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(state, self.path)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class Prints(torch.nn.Module):
    """Writes to the terminal, past whatever cleans text."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        print("\x1b[2J")
        return batch


@pytest.mark.parametrize("kind", [Saves, SavesAtOnce, Prints])
def test_torchscript_of_a_package_does_nothing_but_compute(
    kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    network = Prints() if kind is Prints else kind(str(trace))
    folder = cellmap_packages.make_package(tmp_path / "package", network=network)
    trace.unlink(missing_ok=True)  # scripting may have made it
    with open_package(folder) as package:
        with pytest.raises(ModelContractError, match="pass --trust_model"):
            package.network.load(is_trusted=False)
        assert not trace.exists()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is an old form
            assert package.network.load(is_trusted=True) is not None
