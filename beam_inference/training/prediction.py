"""What a network answers to a batch, or a rank's part of that answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from beam_inference.engines.packed import Pack, run_packed
from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.part import Part, crop, gather_box
from beam_inference.engines.partition.share import own_part, run_divided
from beam_inference.errors import ConfigError, DeviceOutOfMemory, ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.shares import Box, slices_in
from beam_inference.training.ranks import lost_ranks_told


@dataclass(frozen=True)
class Prediction:
    """Logits of patches, of which this rank may have a part.

    Attributes:
        logits: (N, channels, *part) of the patches.
        part: where they lie, and who has the others; None if they are whole.
    """

    logits: Tensor
    part: Part | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """The voxels of an array (N, C, Z, Y, X) of whole patches that these logits are of."""
        if self.part is None:
            return whole
        return whole[slices_in(self.part.box, tuple((0, n) for n in whole.shape[2:]))]

    def whole(self) -> Tensor:
        """The logits of whole patches, on the first rank that shares them; nothing on others."""
        if self.part is None:
            return self.logits
        everything: Box = tuple((0, n) for n in self.part.division.shape)
        nothing: Box = ((0, 0),) * 3
        needs = [everything, *[nothing] * (self.part.mesh.size - 1)]
        return gather_box(self.part, needs)


class PackedNetwork(nn.Module):
    """A network, as a function of patches of several shapes at a time.

    Args:
        network: of (N, C, Z, Y, X).
        everybody: all ranks, over which batch normalisation takes its statistics.
    """

    def __init__(self, network: nn.Module, everybody: Mesh) -> None:
        super().__init__()
        self.network = network
        self._everybody = everybody

    def forward(self, images: Sequence[Tensor], counts: bool = True) -> list[Any]:
        """The network's answer to the patches of each shape.

        Args:
            images: (N, C, Z, Y, X) of each shape, at least one; the ranks may have unlike numbers.
            counts: whether these patches count in statistics.
        """
        if len(images) == 1 and self._everybody.size == 1:
            return [self.network(images[0])]
        return run_packed(self.network, images, Pack(self._everybody, counts))


def predict(
    network: Callable[[Sequence[Tensor], bool], Sequence[Any]],
    images: Sequence[Tensor],
    patch_shapes: Sequence[Sequence[int]],
    channels: int,
    device: torch.device,
    counts: bool = True,
) -> list[Prediction]:
    """Compute the logits of patches of several shapes.

    Args:
        network: a :class:`PackedNetwork`, or what runs one, on the device. All ranks must call it.
        images: patches of each shape with the network's crop margin, (N, C, Z, Y, X).
        patch_shapes: of these patches, ZYX.
        channels: that the network must return.
        device: where the network is.
        counts: whether these patches count in statistics.

    Raises:
        DeviceOutOfMemory: the device has too little memory for it.
        ModelContractError: the network fails, or returns no tensor.
        ConfigError: it returns another shape.
    """
    with explain_network([each.shape for each in images]):
        answers = network([each.to(device, non_blocking=True) for each in images], counts)
    predictions = []
    for image, answer, patch in zip(images, answers, patch_shapes, strict=True):
        if not isinstance(answer, Tensor) or answer.is_complex():
            found = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
            raise ModelContractError(
                f"the network returned a {found}; expected one tensor of logits, real numbers"
            )
        if len(answer) != len(image):
            raise ConfigError(
                f"the network returned {list(answer.shape)} for a batch of {len(image)} samples; "
                "expected an answer for each"
            )
        box = _patch_within(answer.shape, patch, channels)
        predictions.append(
            Prediction(answer[slices_in(box, tuple((0, n) for n in answer.shape[2:]))])
        )
    return predictions


def predict_part(
    network: nn.Module,
    image: Tensor,
    patch: Sequence[int],
    channels: int,
    mesh: Mesh,
    device: torch.device,
) -> Prediction:
    """Compute this rank's part of the logits of patches that ranks share.

    Args:
        network: that computes them, on the device.
        image: (N, C, Z, Y, X), patches with the network's crop margin.
        patch: shape of a patch, ZYX.
        channels: that the network must return.
        mesh: ranks that share the batch; all of them must call this.
        device: where the network is.

    Raises:
        DeviceOutOfMemory: the device has too little memory for it.
        ModelContractError: the network fails, or returns no tensor.
        ConfigError: it returns another shape.
    """
    own = own_part(image, mesh).to(device, non_blocking=True)
    with explain_network([image.shape]):
        part = run_divided(network, own, image.shape[2:], mesh)
    part = crop(part, _patch_within(part.shape, patch, channels))
    return Prediction(part.values, part)


@contextmanager
def explain_network(shapes: Sequence[Sequence[int]]) -> Iterator[None]:
    """Turn the errors of a network, forwards or backwards, into errors of ours.

    Args:
        shapes: of its images, (N, C, Z, Y, X).

    Raises:
        DeviceOutOfMemory: the device has too little memory for it.
        ModelContractError: the network fails.
        LostRank: another rank has ended.
    """
    told = " and ".join(str(list(each)) for each in shapes)
    try:
        with lost_ranks_told():
            yield
    except torch.OutOfMemoryError:
        raise DeviceOutOfMemory(
            f"the device has too little memory to train with {told} voxels at a time: "
            "make batch_size or patch_shape smaller, or take more ranks"
        ) from None
    except (RuntimeError, TypeError, ValueError) as error:
        if "modified by an inplace operation" in str(error):
            raise ModelContractError(
                "the network changes in place what its gradients need, as where what stands "
                "before a batch normalisation in place is used a second time: "
                f"{describe_error(error)}. Let the layer work on a copy, or normalise out of place."
            ) from None
        raise ModelContractError(
            f"the network failed on an image of shape {told}: "
            f"{describe_error(error)}. Check that patch_shape, with network.crop_margin, is one "
            "that the network can take, such as a multiple of its pooling, and input_channels."
        ) from error


def _patch_within(found: Sequence[int], patch: Sequence[int], channels: int) -> Box:
    """Where the patch lies in an answer: the network may answer for its crop margin, too."""
    excess = [a - b for a, b in zip(found[2:], patch, strict=True)] if len(found) == 5 else [-1]
    if found[1] != channels or min(excess) < 0 or any(each % 2 for each in excess):
        raise ConfigError(
            f"the network returned {list(found)}; expected {channels} channels of "
            f"{list(patch)} voxels, or as many more as its input has. Check the factory, "
            "patch_shape, network.crop_margin and the target."
        )
    return tuple((each // 2, each // 2 + n) for each, n in zip(excess, patch, strict=True))
