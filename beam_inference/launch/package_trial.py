"""Tests whether a packaged network can be run here, and gives what its own tool gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import ModelContractError
from beam_inference.geometry.zyx import Zyx
from beam_inference.models.fetch import fetch_package
from beam_inference.models.packages import Folds, NotCompared, Recipe
from beam_inference.worker.predict import predict

MOST_DIFFERENCE = 2e-3
"""Mean difference from the tool's own prediction that is allowed, as a share of the range.

nnU-Net adds up in half precision, which alone costs it up to 8.5e-4, as was measured.
"""


@dataclass(frozen=True, slots=True)
class PackageTest:
    """What a test of a package found.

    Attributes:
        title: what the package is.
        image_shape: shape (C, Z, Y, X) of the image of random numbers that was predicted.
        lowest: the lowest value of the prediction.
        highest: the highest.
        mean_difference: mean absolute difference from the prediction of the package's own tool, as
            a share of its range; None if there is none to compare with.
        absence: why there is none.
    """

    title: str
    image_shape: tuple[int, ...]
    lowest: float
    highest: float
    mean_difference: float | None
    absence: str

    @property
    def is_passed(self) -> bool:
        """Whether the prediction does not differ from that of the package's own tool."""
        return self.mean_difference is None or self.mean_difference <= MOST_DIFFERENCE


def try_package(path: str, folds: Folds | None) -> PackageTest:
    """Predict an image of random numbers, as this package does and as the package's own tool does.

    Args:
        path: a folder or zip file, a path or URL.
        folds: those that are to be used; None for those that the package's own tool takes.

    Raises:
        ModelContractError: it cannot be read, or its network cannot be run here.
    """
    with fetch_package(path, folds) as package:
        recipe = package.network.describe()
        image = _make_image(recipe)
        prediction = _predict(package.network.load(), recipe, image)
        own = None
        absence = ""
        try:
            own = package.network.predict_by_tool(image)
        except NotCompared as error:
            absence = str(error)
    if own is not None and own.shape != prediction.shape:
        raise ModelContractError(
            f"{path}: its own tool predicts an array of shape {own.shape}, expected "
            f"{prediction.shape}: it cannot be compared"
        )
    return PackageTest(
        recipe.title,
        image.shape,
        float(prediction.min()),
        float(prediction.max()),
        None if own is None else float(np.abs(prediction - own).mean() / np.ptp(own)),
        absence,
    )


def _make_image(recipe: Recipe) -> NDArray[np.float32]:
    """An image of random numbers that takes two patches on each axis."""
    values = recipe.values
    patch: Zyx = values["inference.patch_shape"]
    shape = [values["model.input_channels"], *(n + max(1, n // 3) for n in patch)]
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _predict(network: Any, recipe: Recipe, image: NDArray[np.float32]) -> NDArray[np.float32]:
    values = recipe.values
    return predict(
        image,
        network,
        patch_shape=values["inference.patch_shape"],
        patch_overlap=values["inference.patch_overlap"],
        lattice=values["inference.lattice"],
        blend=values["inference.blend"],
        augment=values.get("inference.augment", "none"),
        output_channels=values["model.output_channels"],
        device="cpu",
    )
