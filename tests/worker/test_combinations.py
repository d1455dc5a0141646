"""Options together: any of them with any others, against the definition in float64, and by bits."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_networks
from helpers import do_and_read, job_values, oracle, read_volume, toy, write_volume
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import expit, softmax

from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.geometry.exact_sums import largest_rounding
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import prepare

START = (4, -6, 10)
IMAGE = np.random.default_rng(7).integers(1, 256, (11, 19, 26), dtype=np.uint8)
WAYS = [([8, 8, 16], "recompute"), ([16, 16, 8], "exchange"), ([8, 24, 32], "exchange")]
AROUND = 64
"""Voxels beyond the volume that the oracle knows."""

NORMALIZATIONS: dict[str, Any] = {
    "none": "none",
    "unit": "unit",
    "affine": {"scale": 0.02, "offset": -1.5, "clip": [-1.25, 3.0]},
    "steps": [{"clip": [20, 200]}, {"standard": {"mean": 90, "std": 50}}],
    "patch": [{"scale": 0.5}, {"standard": {"by": "patch", "eps": 0.25, "ddof": 1}}],
}
POSTPROCESS: dict[str, dict[str, Any]] = {
    "affine": {"operator": "affine", "scale": [0.5, -2.0], "offset": [1.0, 0.25]},
    "clip": {"operator": "clip", "low": -0.5, "high": 2.5},
    "sigmoid": {"operator": "sigmoid"},
    "softmax": {"operator": "softmax"},
}
OPTIONS = st.fixed_dictionaries(
    {
        "patch_shape": st.sampled_from([[4, 8, 8], [3, 6, 6], [12, 20, 28]]),
        "overlap": st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 0.7])] * 3),
        "lattice": st.sampled_from(["stride", "spread", "pad"]),
        "blend": st.sampled_from(
            [
                "bump",
                "constant",
                {"gaussian": 0.125, "floor": "nnunet"},
                {"gaussian": 0.2, "floor": "monai"},
                {"gaussian": 0.5},
            ]
        ),
        "margin": st.tuples(*[st.integers(0, 2)] * 3),
        "fill": st.sampled_from(["reflect", "symmetric", "edge", "constant", "network"]),
        "dtype": st.sampled_from(["uint8", "uint16", "int16", "float32"]),
        "normalize": st.sampled_from(list(NORMALIZATIONS)),
        "activation": st.sampled_from(["none", "denormalize", "sigmoid", "softmax"]),
        "augment": st.sampled_from(["none", "xy", "xyz", "z", "zyx", "x"]),
        "share": st.sampled_from([None, 1.0, 0.25]),
        "postprocess": st.lists(st.sampled_from(list(POSTPROCESS)), max_size=2, unique=True),
        "roi": st.sampled_from([None, {"start": [6, -5, 12], "stop": [14, 9, 33]}]),
    }
)


@dataclass
class Job:
    """Options that were drawn, as values of a job file and by their definition."""

    options: dict[str, Any]
    image: NDArray[Any] = field(init=False)
    largest: float = 0.0
    """Of the networks' answers before an activation, in magnitude."""

    def __post_init__(self) -> None:
        dtype = np.dtype(self.options["dtype"])
        self.image = IMAGE.astype(dtype) * dtype.type(257 if dtype == np.uint16 else 1)

    @property
    def is_denormalized(self) -> bool:
        """Whether the normalisation is undone, which steps are not for two channels."""
        is_list = isinstance(NORMALIZATIONS[self.options["normalize"]], list)
        return self.options["activation"] == "denormalize" and not is_list

    def values(self, source: str, out: Path, way: tuple[list[int], str]) -> dict[str, Any]:
        """The job file."""
        o = self.options
        chunk_shape, strategy = way
        augment = o["augment"]
        more = [toy("conv") | {"share": o["share"]}] if o["share"] is not None else []
        values = job_values(
            source,
            out,
            input=(
                {"fill": "constant", "fill_value": 0.5, "fill_units": "network"}
                if o["fill"] == "network"
                else {"fill": o["fill"], "fill_value": 3 if o["fill"] == "constant" else 0}
            ),
            model=toy(
                "position",
                output_channels=2,
                crop_margin=list(o["margin"]),
                normalize=NORMALIZATIONS[o["normalize"]],
                denormalize=self.is_denormalized,
                activation="none" if o["activation"] == "denormalize" else o["activation"],
                ensemble=more,
                channels=[{}, {}],
            ),
            inference={
                "patch_shape": o["patch_shape"],
                "patch_overlap": [
                    int(share * n) for share, n in zip(o["overlap"], o["patch_shape"], strict=True)
                ],
                "lattice": o["lattice"],
                "blend": o["blend"],
                "augment": (
                    augment if augment in ("none", "xy", "xyz") else {"mirror": list(augment)}
                ),
                "chunk_shape": chunk_shape,
                "strategy": strategy,
                "threads": 1,
            },
            output={"block_shape": [8, 8, 8]},
        )
        values["postprocess"] = [POSTPROCESS[name] for name in o["postprocess"]]
        return values | ({} if o["roi"] is None else {"roi": o["roi"]})

    def expected(self, config: JobConfig, bound: float) -> tuple[NDArray[Any], float]:
        """The output by its definition in float64, and how far float32 may be from it."""
        plan = plan_job(config).plan
        padded = self.padded()

        def predict_patch(box: Any) -> Any:
            grown = box.grow(plan.crop_margin)
            seen = tuple(
                slice(a - first + AROUND, b - first + AROUND)
                for a, b, first in zip(grown.start, grown.stop, plan.volume.start, strict=True)
            )
            answer = self.answer(padded[seen])
            inner = (
                slice(m, n - m) for m, n in zip(plan.crop_margin, answer.shape[1:], strict=True)
            )
            return answer[(slice(None), *inner)]

        blended, _ = oracle(plan.lattice, predict_patch, 2, window=config.inference.window)
        values = blended[(slice(None), *plan.chunks.roi.slices_in(plan.lattice.domain))]
        slope = {"sigmoid": 1 / 4, "softmax": 1 / 2}.get(self.options["activation"], 1)
        of_network = 2e-6 * max(slope * self.largest, np.abs(blended).max())
        error = largest_rounding(bound, plan.lattice.most_patches) + of_network
        for name in self.options["postprocess"]:
            values, error = postprocess(name, values, error)
        return values, error + 1e-6 * np.abs(values).max()

    def padded(self) -> NDArray[np.float64]:
        """The volume and what lies around it; NaN where the network sees a value of its own."""
        fill = self.options["fill"]
        keys: dict[str, Any] = {
            "constant": {"mode": "constant", "constant_values": 3},
            "network": {"mode": "constant", "constant_values": np.nan},
        }.get(fill, {"mode": fill})
        return np.pad(self.image.astype(np.float64), AROUND, **keys)

    def answer(self, patch: NDArray[np.float64]) -> NDArray[np.float64]:
        """The network's answer to a patch of stored values with its margin."""
        o = self.options
        normal = np.nan_to_num(self.normalized(patch), nan=0.5)
        activate = {
            "sigmoid": expit,
            "softmax": lambda values: softmax(values, axis=0),
        }.get(o["activation"], lambda values: values)
        members: list[tuple[float, torch.nn.Module]] = [(1.0, toy_networks.position())]
        if o["share"] is not None:
            members.append((o["share"], toy_networks.conv().double()))
        total = np.zeros((2, *patch.shape))
        count = 0
        with torch.no_grad():
            for transposes, flips in symmetries(o["augment"]):
                mapped = np.flip(normal.swapaxes(1, 2) if transposes else normal, flips)
                batch = torch.from_numpy(mapped.copy())[None, None]
                answers = [(share, net(batch)[0].numpy()) for share, net in members]
                self.largest = max(self.largest, *(np.abs(each).max() for _, each in answers))
                answer = sum(share * activate(values) for share, values in answers)
                answer = np.flip(answer, [axis + 1 for axis in flips])
                total += answer.swapaxes(2, 3) if transposes else answer
                count += 1
        mean = total / count / sum(share for share, _ in members)
        return self.denormalized(mean) if self.is_denormalized else mean

    def normalized(self, patch: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the network sees of stored values; NaN stays."""
        match self.options["normalize"]:
            case "none":
                return patch
            case "unit":
                return patch / np.iinfo(self.options["dtype"]).max
            case "affine":
                return np.clip(patch * 0.02 - 1.5, -1.25, 3.0)
            case "steps":
                return (np.clip(patch, 20, 200) - 90) / 50
            case _:
                halves = patch * 0.5
                return (halves - halves.mean()) / (halves.std(ddof=1) + 0.25)

    def denormalized(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Stored values of the network's."""
        match self.options["normalize"]:
            case "unit":
                return values * np.iinfo(self.options["dtype"]).max
            case "affine":
                return (values + 1.5) / 0.02
            case _:
                return values


def symmetries(augment: str) -> Iterator[tuple[bool, list[int]]]:
    """Whether y and x are exchanged, and the axes that are flipped then, of each symmetry."""
    axes = {"none": "", "xy": "yx", "xyz": "zyx"}.get(augment, augment)
    for flips in product(*[(False, True)] * len(axes)):
        flipped = ["zyx".index(axis) for axis, flip in zip(axes, flips, strict=True) if flip]
        for transposes in (False, True) if augment in ("xy", "xyz") else (False,):
            yield transposes, flipped


def postprocess(
    name: str, values: NDArray[np.float64], error: float
) -> tuple[NDArray[np.float64], float]:
    """An operator by its formula, and what it makes of an error of its input."""
    match name:
        case "affine":
            numbers = np.array([[0.5, 1.0], [-2.0, 0.25]])[:, :, None, None, None]
            return values * numbers[:, 0] + numbers[:, 1], error * 2
        case "clip":
            return values.clip(-0.5, 2.5), error
        case "sigmoid":
            return expit(values), error / 4
        case _:
            return softmax(values, axis=0), error / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which each job has one of its own."""
    return tmp_path_factory.mktemp("combinations")


def check(options: dict[str, Any], folder: Path) -> None:
    """Do a job in several ways, which must have the same bits and be what it is by definition."""
    job = Job(options)
    target = Path(folder, f"{len(list(folder.iterdir()))}")
    source = write_volume(target / "in", job.image, START, block_shape=(8, 16, 16))
    try:
        config = parse_job(job.values(source, target / "out", WAYS[0]), target)
        launch = prepare(config)
    except ConfigError as error:
        event(f"refused: {str(error)[:60]}")
        reject()
    found = [
        do_and_read(job.values(source, target / f"out{number}", way), target)
        for number, way in enumerate(WAYS)
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    expected, allowed = job.expected(config, launch.read_job().sum_bounds[0])
    assert found[0].shape == expected.shape
    assert np.abs(found[0] - expected).max() <= allowed


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(options=OPTIONS)
def test_any_options_together_give_what_they_are_defined_as(options, folder):
    check(options, folder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(options=OPTIONS)
def test_many_options_together_do(options, folder):
    check(options, folder)


NETWORKS: dict[str, dict[str, Any]] = {
    "position": toy("position"),
    "finer": toy("finer", output_scale=[2, 2, 2], crop_margin=[2, 2, 2]),
    "coarser": toy("halved", output_scale=[1, "1/2", "1/2"]),
    "planes": toy("flat", dims=2, planes=["yx", "zx", "zy"], prediction_bound=4),
    "sections": toy("stack", dims=2, sections=5, prediction_bound=4),
}
GEOMETRIES = st.fixed_dictionaries(
    {
        "network": st.sampled_from(list(NETWORKS)),
        "patch_shape": st.sampled_from([[4, 8, 8], [8, 12, 16], [12, 20, 28]]),
        "overlap": st.tuples(*[st.sampled_from([0, 2, 4])] * 3),
        "lattice": st.sampled_from(["stride", "spread", "pad"]),
        "blend": st.sampled_from(["bump", "constant", {"gaussian": 0.125, "floor": "nnunet"}]),
        "fill": st.sampled_from(["reflect", "symmetric", "edge"]),
        "resample": st.sampled_from(
            [
                None,
                {"voxel_size_nm": [40, 20, 20]},
                {"voxel_size_nm": [30, 8, 13], "order": 3},
                {"voxel_size_nm": [13, 10, 7], "order": 0},
                {"voxel_size_nm": [60, 10, 10], "order": 3, "separate_z": True},
            ]
        ),
        "voxel_size_nm": st.sampled_from(["network", "input", [25, 16, 9]]),
        "order": st.sampled_from([0, 1, 3]),
        "augment": st.sampled_from(["none", {"mirror": ["z", "x"]}]),
        "second": st.booleans(),
        "is_masked": st.booleans(),
        "postprocess": st.sampled_from(
            [[], [{"operator": "smooth", "sigma": [0.4, 0.8, 0.6]}, {"operator": "sigmoid"}]]
        ),
    }
)


def values_of_geometry(
    options: dict[str, Any], folder: Path, number: int, way: tuple[list[int], str]
) -> dict[str, Any]:
    """A job file of options that change the places of voxels, with one output or two."""
    o = options
    chunk_shape, strategy = way
    model = NETWORKS[o["network"]] | {"output_channels": 2, "normalize": "unit"}
    patch_shape = [1, *o["patch_shape"][1:]] if o["network"] == "sections" else o["patch_shape"]
    output: dict[str, Any] = {"block_shape": [8, 8, 8], "voxel_size_nm": o["voxel_size_nm"]}
    if o["voxel_size_nm"] != "network":
        output["resample"] = {"order": o["order"]}
    values = job_values(
        f"file://{folder}/in",
        folder / f"out{number}",
        input={"fill": o["fill"]} | ({} if o["resample"] is None else {"resample": o["resample"]}),
        model=model | {"channels": [{}, {}]},
        inference={
            "patch_shape": patch_shape,
            "patch_overlap": [
                min(n, p - 1) for n, p in zip(o["overlap"], patch_shape, strict=True)
            ],
            "lattice": o["lattice"],
            "blend": o["blend"],
            "augment": o["augment"],
            "chunk_shape": chunk_shape,
            "strategy": strategy,
            "threads": 1,
        },
        output=output,
    )
    values["postprocess"] = o["postprocess"]
    if o["second"]:
        labels = {"path": f"{folder}/labels{number}", "dtype": "uint8"}
        values["outputs"] = {"labels": labels | {"postprocess": [{"operator": "argmax"}]}}
    if o["is_masked"]:
        values["mask"] = {"path": f"{folder}/mask", "above": 60}
    return values


def check_geometry(options: dict[str, Any], folder: Path) -> None:
    """Do a job in several ways; all its outputs must have the same bits."""
    target = Path(folder, f"{len(list(folder.iterdir()))}")
    size = (20.0, 10.0, 10.0)
    write_volume(target / "in", IMAGE, START, block_shape=(8, 16, 16), voxel_size_nm=size)
    write_volume(target / "mask", IMAGE, START, block_shape=(8, 16, 16), voxel_size_nm=size)
    jobs = [values_of_geometry(options, target, number, way) for number, way in enumerate(WAYS)]
    try:
        prepare(parse_job(jobs[0], target))
    except ConfigError as error:
        event(f"refused: {str(error)[:60]}")
        reject()
    outputs = []
    for number, values in enumerate(jobs):
        outputs.append([do_and_read(values, target)])
        if options["second"]:
            outputs[-1].append(read_volume(target / f"labels{number}"))
    for others in outputs[1:]:
        for found, first in zip(others, outputs[0], strict=True):
            assert found.shape == first.shape
            assert found.tobytes() == first.tobytes()


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(options=GEOMETRIES)
def test_any_geometry_has_the_same_bits_however_it_is_cut(options, folder):
    check_geometry(options, folder)


@pytest.mark.slow
@pytest.mark.timeout(6000)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(options=GEOMETRIES)
def test_many_geometries_do(options, folder):
    check_geometry(options, folder)
