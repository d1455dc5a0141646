"""Tests whether a packaged network can be run here, and gives what its own tool gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import describe_fault
from beam_inference.config.inference import Inference
from beam_inference.config.network import Network
from beam_inference.config.normalize import Normalize
from beam_inference.config.operators import ArrayPlace, InstalledOperator, Operator
from beam_inference.engines.choice import engines_to_try
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.predictor import Predictor
from beam_inference.environment import usable_cores
from beam_inference.errors import BeamInferenceError, ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, triple
from beam_inference.job.parts import make_normalization
from beam_inference.models.fetch import fetch_package
from beam_inference.models.hashes import model_sha256
from beam_inference.models.loading import as_network
from beam_inference.models.package_files import local_file
from beam_inference.models.packages import Folds, NotCompared, Package, Recipe, Sample
from beam_inference.operators.level_steps import normalization_of_array
from beam_inference.operators.normalize_steps import normalize_by_place, split_steps
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.worker.predict import predict

Value = TypeVar("Value")

MOST_DIFFERENCE = 2e-3
"""Mean difference from the tool's own prediction that is allowed, as a share of the range.

nnU-Net adds up in half precision, which alone costs it up to 8.5e-4, as was measured.
"""


_MOST_NUMBERS = 1 << 30
"""Most numbers of an image that is drawn; they take 12 GiB for a moment."""


@dataclass(frozen=True, slots=True)
class PackageTest:
    """What a test of a package found.

    Attributes:
        title: what the package is.
        image: what was predicted.
        image_shape: its shape (C, Z, Y, X).
        lowest: the lowest value of the prediction.
        highest: the highest.
        comparison: what it was compared with, and how far off it is, in a sentence; or why it was
            compared with nothing.
        difference: how far off it is, in the unit of ``limit``; None if it was compared with
            nothing.
        limit: the largest difference that passes.
    """

    title: str
    image: str
    image_shape: tuple[int, ...]
    lowest: float
    highest: float
    comparison: str
    difference: float | None = None
    limit: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Whether the prediction is what it should be, as far as that is known."""
        if not (math.isfinite(self.lowest) and math.isfinite(self.highest)):
            return False
        return self.difference is None or self.difference <= self.limit


def try_package(path: str, folds: Folds | None, *, is_trusted: bool = False) -> PackageTest:
    """Predict the example that a package brings, or else an image of random numbers.

    The example's result is in the package. The image's is compared with the prediction of the
    package's own tool, where that is installed.

    Args:
        path: a folder or zip file, a path or URL.
        folds: those that are to be used; None for those that the package's own tool takes.
        is_trusted: whether code in the package may be run.

    Raises:
        ModelContractError: it cannot be read, or its network cannot be run here.
    """
    with fetch_package(path, folds) as package:
        sample = package.network.sample()
        if sample is not None:
            return _try_sample(package, sample, is_trusted=is_trusted)
        return _compare_with_tool(package, is_trusted=is_trusted)


def _compare_with_tool(package: Package, *, is_trusted: bool) -> PackageTest:
    recipe = package.network.describe()
    if recipe.obstacle is not None:
        raise ModelContractError(f"{package.path}: it cannot be run here: {recipe.obstacle}")
    if recipe.network_file is None and "model.output_scale" not in recipe.values:
        image = _make_image(recipe)
        network = package.network.load(is_trusted=is_trusted)
        with _explain_network(package, image.shape):
            prediction = _predict(network, recipe, image)
    else:
        image = _make_patch(recipe)
        prediction = _predict_whole(package, recipe, image, is_trusted=is_trusted)
    test = partial(
        PackageTest,
        recipe.title,
        "an image of random numbers",
        image.shape,
        float(prediction.min()),
        float(prediction.max()),
    )
    try:
        own = package.network.predict_by_tool(image)
    except NotCompared as error:
        return test(f"not compared: {error}")
    if own.shape != prediction.shape:
        raise ModelContractError(
            f"{package.path}: its own tool predicts an array of shape {own.shape}, expected "
            f"{prediction.shape}: it cannot be compared"
        )
    extent = float(np.ptp(own))
    unit = "of the range"
    if extent == 0:  # such as after a softmax of one channel
        extent = max(float(np.abs(own).max()), 1.0)
        unit = f"of {extent:.3g}; the tool gives one value throughout, which says little"
    difference = float(np.abs(prediction - own).mean()) / extent
    return test(
        f"mean difference from its own tool: {difference:.1e} {unit}; at most "
        f"{MOST_DIFFERENCE:g} is allowed",
        difference,
        MOST_DIFFERENCE,
    )


def _try_sample(package: Package, sample: Sample, *, is_trusted: bool) -> PackageTest:
    """Predict a package's example in one call of its network."""
    recipe = package.network.describe()
    prediction = _predict_whole(package, recipe, sample.image, is_trusted=is_trusted)
    expected = sample.result.astype(np.float64)
    if not np.isfinite(expected).all():
        raise ModelContractError(
            f"{package.path}: the result of its example holds NaN or infinite values, by which "
            "nothing can be judged"
        )
    if expected.shape != prediction.shape:
        raise ModelContractError(
            f"{package.path}: the network makes an array of shape {list(prediction.shape)} of its "
            f"example, expected {list(expected.shape)}: it is not the network of this package"
        )
    difference = np.abs(prediction - expected)
    # written so that what is no number counts as different
    is_near = difference <= sample.absolute + sample.relative * np.abs(expected)
    share = float(1 - is_near.mean())
    return PackageTest(
        recipe.title,
        "the package's own example",
        sample.image.shape,
        float(prediction.min()),
        float(prediction.max()),
        f"largest difference from the package's own result: {difference.max():.1e}; "
        f"{share * 1e6:.0f} of a million values differ by more than {sample.absolute:g} + "
        f"{sample.relative:g} of the value; at most {sample.mismatches * 1e6:.0f} may",
        share,
        sample.mismatches,
    )


def _predict_whole(
    package: Package, recipe: Recipe, image: AnyArray, *, is_trusted: bool
) -> NDArray[np.float32]:
    """What a job makes of an image that is one patch, the halo included."""
    image = image.astype(np.float32)
    with _open_predictor(package, recipe, image.shape, is_trusted=is_trusted) as predictor:
        normalize = _read_values(
            package, _NORMALIZE, recipe.values.get("model.normalize", "none"), "preprocessing"
        )
        definite = normalization_of_array(normalize, image)
        if isinstance(definite, tuple):
            steps, _ = split_steps(definite)
            image = normalize_by_place(image, None, np.arange(image.shape[1]), steps)
        batch = make_normalization(definite, image.dtype)(image.copy()[None])[0]
        with predictor.device.session():
            values = _call(package, predictor, np.ascontiguousarray(batch[None]))
    channels = recipe.values["model.output_channels"]
    if values.shape[0] != channels:
        raise ModelContractError(
            f"{package.path}: the network returns {values.shape[0]} channels, and the package says "
            f"{channels}: it is not the network of this package"
        )
    operators = _read_values(
        package, _OPERATORS, recipe.values.get("postprocess", []), "postprocessing"
    )
    whole = BoundingBox((0, 0, 0), triple(values.shape[1:]))
    return apply_functions(build_functions(operators), values, ArrayPlace(whole, (1.0, 1.0, 1.0)))


def _read_values(package: Package, adapter: TypeAdapter[Value], values: object, what: str) -> Value:
    """Read what a package does beside its network, as keys of a job.

    Raises:
        ModelContractError: it does what no job can, such as to divide by next to nothing.
    """
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        raise ModelContractError(
            f"{package.path}: no job can do its {what} ({describe_fault(error)}). "
            "Mend the package, or write the job file by hand."
        ) from None


def _call(package: Package, predictor: Predictor, batch: NDArray[np.float32]) -> AnyArray:
    with _explain_network(package, batch.shape):
        answer = predictor.predict(predictor.device.upload(batch))
        return np.array(predictor.device.download(answer[0])())


@contextmanager
def _explain_network(package: Package, shape: Sequence[int]) -> Iterator[None]:
    """Translate what a network raises that is given an array as its package says."""
    try:
        yield
    except BeamInferenceError:
        raise
    except Exception as error:
        raise ModelContractError(
            f"{package.path}: the network fails on an array of shape {list(shape)}, as the "
            f"package describes it: {describe_error(error)}"
        ) from None


_NORMALIZE: TypeAdapter[Normalize] = TypeAdapter(Normalize)
_OPERATORS: TypeAdapter[list[Operator]] = TypeAdapter(list[InstalledOperator])


@contextmanager
def _open_predictor(
    package: Package, recipe: Recipe, shape: Sequence[int], *, is_trusted: bool
) -> Iterator[Predictor]:
    """The network of a package on the CPU, for one patch of a shape (C, Z, Y, X)."""
    values = {
        key.removeprefix("model."): recipe.values[key]
        for key in _MODEL_KEYS
        if key in recipe.values
    }
    settings = Inference.model_validate(
        {
            "patch_shape": list(shape[1:]),
            "chunk_shape": list(shape[1:]),
            "device": "cpu",
            "threads": usable_cores(),
        }
    )
    file = package.find_network(recipe)
    if file is None:
        model = Network.model_validate({**values, "path": str(package.path)})
        network = as_network(package.network.load(is_trusted=is_trusted))
        engine = settings.model_copy(update={"engine": "torch"})
        yield load_predictor(model, engine, network=network)
        return
    with local_file(file) as path:
        model = Network.model_validate({**values, "path": str(path)})
        model_sha256(model)  # refuses one that names other files
        (name, *_) = engines_to_try(model, settings)
        yield load_predictor(model, settings.model_copy(update={"engine": name}))


_MODEL_KEYS = (
    "model.input_channels",
    "model.output_channels",
    "model.activation",
    "model.dims",
)


def _make_image(recipe: Recipe) -> NDArray[np.float32]:
    """An image of random numbers that takes two patches on each axis."""
    values = recipe.values
    patch: Zyx = values["inference.patch_shape"]
    return _draw([values["model.input_channels"], *(n + max(1, n // 3) for n in patch)])


def _make_patch(recipe: Recipe) -> NDArray[np.float32]:
    """Random numbers as the network is given them for one patch."""
    values = recipe.values
    patch = values["inference.patch_shape"]
    margins = values.get("model.crop_margin", [0, 0, 0])
    scales = values.get("model.output_scale", [1, 1, 1])
    shape = [
        (n + 2 * margin) // scale for n, margin, scale in zip(patch, margins, scales, strict=True)
    ]
    return _draw([values["model.input_channels"], *shape])


def _draw(shape: Sequence[int]) -> NDArray[np.float32]:
    """An image of random numbers.

    Raises:
        ModelContractError: it would be larger than any patch that a machine takes.
    """
    if math.prod(shape) > _MOST_NUMBERS:
        raise ModelContractError(
            f"the package says that its network takes patches from images such as {list(shape)}: "
            f"{math.prod(shape):,} numbers are more than the {_MOST_NUMBERS:,} that are tried"
        )
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _predict(network: Any, recipe: Recipe, image: NDArray[np.float32]) -> NDArray[np.float32]:
    values = recipe.values
    return predict(
        image,
        network,
        patch_shape=values["inference.patch_shape"],
        patch_overlap=values["inference.patch_overlap"],
        crop_margin=values.get("model.crop_margin", (0, 0, 0)),
        lattice=values.get("inference.lattice", "stride"),
        blend=values.get("inference.blend", "bump"),
        augment=values.get("inference.augment", "none"),
        output_channels=values["model.output_channels"],
        dims=values.get("model.dims", 3),
        device="cpu",
    )
