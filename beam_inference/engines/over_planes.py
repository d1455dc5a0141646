"""2-D networks over several planes of 3-D patches.

Where a network is run over several planes, its answers for all sections of a 3-D patch, along each
plane, become one prediction of that patch *before* patches are blended. So the loop over patches,
the sums, the seams and the receipts know one prediction for each patch, as of any network, and what
they promise holds: each voxel's sum is exact in whatever order patches are added, and no chunk ever
needs the sums of a single plane. For means and sums it would make no difference to add up each
plane by itself, as blending is linear and patches weigh the same for each plane. Votes are taken of
each patch's answers, and blended as shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from beam_inference.config.network import Network
from beam_inference.config.planes import CombinePlanes, Plane, PlaneSum, normal_axis
from beam_inference.engines.protocol import Device, Forward
from beam_inference.engines.trial import crop_to_patch
from beam_inference.errors import ModelContractError
from beam_inference.geometry.zyx import Zyx, triple


def run_over_planes(forward: Forward, device: Device, model: Network) -> Forward:
    """A forward pass over 3-D patches, by one over sections.

    Each call of the network has one section of each patch of the batch, so all calls are of one
    size, and as many patches as fit the device make them large.

    Args:
        forward: the network's own forward pass, of batches (N, C, sections, rows, columns), with
            its activation.
        device: where its arrays are.
        model: the job's section, which names planes.

    Returns:
        A function of batches (N, C, Z, Y, X), grown by ``model.input_margin``, to predictions of
        patches.
    """
    faces = [_Face(plane, model.sections, model.crop_margin) for plane in model.planes or ()]
    margin = model.input_margin
    share = 1 if isinstance(model.combine_planes, PlaneSum) else len(faces)

    def predict(batch: Any) -> Any:
        patch = triple(n - 2 * m for n, m in zip(batch.shape[2:], margin, strict=True))
        total = device.empty((len(batch), model.output_channels, *patch))
        total[:] = 0
        for face in faces:
            seen = face.turn(batch[face.crop(patch, margin)])
            written = face.turn(total)
            for number in range(written.shape[2]):
                # a copy, for a network may change what it is given
                answer = forward(device.copy(seen[:, :, number : number + model.sections]))
                part = face.crop_answer(answer, len(batch), patch)
                _add(written[:, :, number], part, face.plane, model.combine_planes)
        if share > 1:
            total /= share
        return total

    return predict


def plane_batch_shapes(model: Network, grown: Zyx, batch_size: int) -> list[tuple[int, ...]]:
    """Shapes (N, C, rows, columns) of the batches that a network of planes is called with.

    Args:
        model: the job's section.
        grown: voxels of a patch and of the crop margin around it, ZYX, as the network takes them.
        batch_size: patches per call.
    """
    channels = model.input_channels * model.sections
    shapes = [
        (batch_size, channels, *(grown["zyx".index(axis)] for axis in plane))
        for plane in model.planes or ("yx",)
    ]
    return list(dict.fromkeys(shapes))


@dataclass(frozen=True, slots=True)
class _Face:
    """One plane of a patch.

    Attributes:
        plane: its axes.
        sections: neighbouring ones that the network takes.
        crop_margin: of the network, ZYX, of which those along the plane's axes count.
    """

    plane: Plane
    sections: int
    crop_margin: Zyx

    def turn(self, array: Any) -> Any:
        """An array (N, C, Z, Y, X) as (N, C, sections, rows, columns)."""
        normal = normal_axis(self.plane)
        array = array.swapaxes(2, 3) if normal else array
        array = array.swapaxes(2, 4) if normal == 2 else array
        is_transposed = self.plane in ("xy", "xz", "yz")
        return array.swapaxes(3, 4) if is_transposed else array

    def crop(self, patch: Zyx, margin: Zyx) -> tuple[slice, ...]:
        """The part of an input, grown by a margin, that the plane's sections lie in."""
        needed = list(self.crop_margin)
        needed[normal_axis(self.plane)] = self.sections // 2
        parts = [
            slice(wide - own, wide + length + own)
            for wide, own, length in zip(margin, needed, patch, strict=True)
        ]
        return (slice(None), slice(None), *parts)

    def crop_answer(self, answer: Any, count: int, patch: Zyx) -> Any:
        """What the network says of a section's voxels in the patch: (N, C, rows, columns).

        Raises:
            ModelContractError: the answer has another shape.
        """
        rows, columns = ("zyx".index(axis) for axis in self.plane)
        margin = (0, self.crop_margin[rows], self.crop_margin[columns])
        channels = int(answer.shape[1])
        shape = (1, patch[rows], patch[columns])
        return crop_to_patch(answer, (count, channels), shape, margin)[:, :, 0]


def _add(total: Any, answer: Any, plane: Plane, combine: CombinePlanes) -> None:
    """Add an answer (N, C, rows, columns) for sections of a plane to what is known of them."""
    _check_channels(total.shape[1], answer.shape[1], combine)
    if isinstance(combine, PlaneSum):
        for channel, terms in enumerate(combine.sum):
            if plane in terms:
                total[:, channel] += answer[:, terms[plane]]
    elif combine == "vote":
        winner = answer.argmax(1)
        for channel in range(total.shape[1]):
            total[:, channel] += winner == channel
    else:
        total += answer


def _check_channels(expected: int, found: int, combine: CombinePlanes) -> None:
    if isinstance(combine, PlaneSum):
        is_right = found >= combine.network_channels
        wanted = f"at least {combine.network_channels}, which model.combine_planes names"
    else:
        is_right = found == expected
        wanted = f"{expected}: check model.output_channels"
    if not is_right:
        raise ModelContractError(
            f"the network answers {found} channels for a section of a plane; expected {wanted}"
        )
