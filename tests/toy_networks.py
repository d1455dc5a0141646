"""Small torch networks that tests name as ``file.py:factory`` in job files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from beam_inference.residual_unet import ResidualUNet


class Position(nn.Module):
    """One channel in, two out; answers depend on the place in the patch: wrong geometry shows."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        z, y, x = (torch.linspace(1, 2, n, device=batch.device) for n in batch.shape[2:])
        ramp = z[:, None, None] * y[:, None] ** 2 * x**3
        return torch.cat([batch * ramp, batch - ramp], 1)


def position() -> nn.Module:
    return Position()


class Same(nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


def same() -> nn.Module:
    return Same()


def conv() -> nn.Conv3d:
    torch.manual_seed(0)
    return nn.Conv3d(1, 2, 3, padding=1)


def conv_with_the_same_bias() -> nn.Module:
    network = conv()
    network.weight.data *= -17
    return network


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv3d(1, 4, 3, padding=1)
    norm = nn.BatchNorm3d(4)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean += 0.3
    norm.running_var *= 2
    return nn.Sequential(convolution, norm, nn.ReLU(), nn.Dropout(0.5), nn.Conv3d(4, 2, 1))


def batch_norm_without_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2, track_running_stats=False))


class OwnBuffer(nn.Module):
    """Returns a tensor of its own, the same at every call."""

    answer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("answer", torch.ones(2, 1, 8, 16, 16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.answer


def own_buffer() -> nn.Module:
    return OwnBuffer()


class Expanded(nn.Module):
    """Returns a view in which three channels are one memory."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.expand(-1, 3, -1, -1, -1)


def expanded() -> nn.Module:
    return Expanded()


def flat() -> nn.Module:
    """A 2-D network: (N, 1, Y, X) to (N, 2, Y, X)."""
    torch.manual_seed(0)
    return nn.Conv2d(1, 2, 3, padding=1)


def stack() -> nn.Module:
    """A 2-D network of five sections: (N, 5, Y, X) to (N, 2, Y, X)."""
    torch.manual_seed(0)
    return nn.Conv2d(5, 2, 3, padding=1)


class Valid(nn.Module):
    """A network without padding: returns the patch already cropped by one voxel on each side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(1, 1, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        cropped: torch.Tensor = self.conv(batch)
        return cropped


def valid() -> nn.Module:
    return Valid()


class Pair(nn.Module):
    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return batch, batch


def pair() -> nn.Module:
    return Pair()


class Heads(nn.Module):
    """Three heads, as a tuple: two channels, one, and one of fewer voxels. Notes its calls."""

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if "TOY_NETWORK_LOG" in os.environ:
            with Path(os.environ["TOY_NETWORK_LOG"]).open("a") as log:
                log.write(f"{len(batch)}\n")
        positions = Position()(batch)
        return positions, 20 * torch.sin(batch * 7), batch[..., ::2]


class HeadsByName(nn.Module):
    """Those of Heads, as a dict."""

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        places, waves, fewer = Heads()(batch)
        return {"places": places, "waves": waves, "fewer": fewer}


def heads() -> nn.Module:
    return Heads()


def heads_by_name() -> nn.Module:
    return HeadsByName()


class ConvHeads(nn.Module):
    """Two heads of one convolution, which other engines can convert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Conv3d(1, 4, 3, padding=1)
        self.first = nn.Conv3d(4, 2, 1)
        self.second = nn.Conv3d(4, 1, 1)

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = torch.relu(self.trunk(batch))
        return self.first(shared), 50 * self.second(shared)


def conv_heads() -> nn.Module:
    return ConvHeads()


def numpy_heads() -> Callable[[NDArray[np.float32]], Any]:
    def network(batch: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [batch, 2 * batch]

    return network


class NotANumber(nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch / 0 * 0


def not_a_number() -> nn.Module:
    return NotANumber()


def raises() -> nn.Module:
    raise RuntimeError("the factory is broken")


def not_a_module() -> int:
    return 3


class Counted(nn.Module):
    """Returns its input; notes each call as a line in the file that TOY_NETWORK_LOG names."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with Path(os.environ["TOY_NETWORK_LOG"]).open("a") as log:
            log.write(f"{len(batch)} {os.getpid()}\n")
        return batch


def counted() -> nn.Module:
    return Counted()


class Slow(nn.Module):
    """Returns a function of its input and of the position in the patch, after a while."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        positions: torch.Tensor = Position()(batch)
        return positions[:, :1]


def slow() -> nn.Module:
    return Slow()


def slowly(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What comes after a network may take its time, too."""
    time.sleep(0.2)
    return values


def sleeps() -> nn.Module:
    """A factory that takes its time, as large models do, and says when it has begun."""
    Path(os.environ["TOY_NETWORK_LOG"]).write_text("begun")
    time.sleep(60)
    return Same()


class Hangs(nn.Module):
    """Hangs at its twentieth call, as a driver does, while there is a file ``hang``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        while self.calls >= 20 and Path("hang").exists():
            time.sleep(60)
        return batch


def hangs() -> nn.Module:
    return Hangs()


def random() -> nn.Module:
    """A network whose weights somebody forgot to load."""
    torch.seed()
    return nn.Conv3d(1, 1, 3, padding=1)


class Choosing(nn.Module):
    """Does one thing or another, by the values of its input: no graph can say so."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch if float(batch.mean()) > 0.25 else -batch


def choosing() -> nn.Module:
    return Choosing()


class Skipping(nn.Module):
    """Joins what was pooled to what was not, as U-Nets do: patches must be even."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool3d(batch, 2)
        return torch.cat([batch, nn.functional.interpolate(pooled, scale_factor=2)], 1)[:, :1]


def skipping() -> nn.Module:
    return Skipping()


class Three(nn.Module):
    """Three channels that differ: the input, its negative, and zero."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([batch, 255 - batch, 0 * batch], dim=1)


def three() -> nn.Module:
    return Three()


class Differences(nn.Module):
    """Differences of each voxel from those 1 before along z, 3 along y, 3 along x, 1 along x."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        steps = ((1, 2), (3, 3), (3, 4), (1, 4))
        return torch.cat([(batch - torch.roll(batch, n, axis)).abs() for n, axis in steps], dim=1)


def differences() -> nn.Module:
    return Differences()


class Cramped(nn.Module):
    """On a device that has memory for so many patches."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > int(os.environ["TOY_DEVICE_PATCHES"]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch


def cramped() -> nn.Module:
    return Cramped()


def residual_unet() -> nn.Module:
    torch.manual_seed(0)
    return ResidualUNet(output_channels=3, widths=(4, 6))


def finer() -> nn.Module:
    """Eight voxels for each of its input, of which it needs one more on each side."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2, stride=2))


def valid_plane() -> nn.Module:
    """A 2-D network without padding, which takes a margin of one voxel on each side."""
    torch.manual_seed(0)
    return nn.Conv2d(1, 2, 3)


class Mixture(nn.Module):
    """Two channels in which each channel of the input, and each place, counts otherwise."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1, batch.shape[1] + 1, dtype=batch.dtype).reshape(-1, 1, 1, 1)
        mixed: torch.Tensor = Position()((batch * weights).sum(1, keepdim=True) / 8)
        return mixed


def mixture() -> nn.Module:
    return Mixture()


def coarser() -> nn.Module:
    """One voxel for eight of its input, of which it needs two more on each side."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 4, stride=2, padding=1)
    )


def halved() -> nn.Module:
    """Means over 1 x 2 x 2 voxels of two channels that tell places in a patch from each other."""
    return nn.Sequential(Position(), nn.AvgPool3d((1, 2, 2)))


class LessItsMean(nn.Module):
    """Takes the mean over all of its batch."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch - batch.mean()


def less_its_mean() -> nn.Module:
    return LessItsMean()


class LastBitsByPlace(nn.Module):
    """Computes what does not fill a vector of 16 values in another way, as processors do."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        flat = batch.flatten()
        flat[len(flat) // 16 * 16 :] *= 1 + 2**-22
        return flat.reshape(batch.shape)


def last_bits_by_place() -> nn.Module:
    return LastBitsByPlace()


class Remembering(nn.Module):
    """Takes a mean over what it has seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(batch.mean())
        return batch - self.mean


def remembering() -> nn.Module:
    return Remembering()
