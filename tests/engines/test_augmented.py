"""Test-time augmentation against brute force: every pair of voxels under every symmetry."""

from itertools import product

import numpy as np
import pytest
import torch
import toy_networks
from helpers import job_values, read_volume, toy, write_job, write_volume
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.cli.main import main
from beam_inference.engines.augmented import augment, symmetries
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.torch_forward import torch_predictor


def predictor_in_numpy(function):
    return Predictor(NumpyDevice(), function)


def predictor_in_torch(function):
    return torch_predictor(
        lambda batch: torch.from_numpy(function(batch.numpy())), torch.device("cpu")
    )


def asymmetric(channels):
    """A network whose answer depends on the place in the patch, differently in each channel."""

    def function(batch):
        z, y, x = (np.linspace(1, 2, n, dtype=np.float32) for n in batch.shape[2:])
        ramps = [
            z[:, None, None] ** c * y[:, None] ** (c + 1) * x ** (c + 2) for c in range(channels)
        ]
        return np.stack([(batch * ramp).sum(1) for ramp in ramps], 1)

    return function


def image_of(voxel, shape, symmetry):
    """Where a voxel of the patch is in the mapped patch."""
    z, y, x = voxel
    if symmetry.transpose:
        y, x = (x, y)
        shape = (shape[0], shape[2], shape[1])
    return tuple(
        n - 1 - v if flip else v
        for v, n, flip in zip((z, y, x), shape, symmetry.flips, strict=True)
    )


def mapped(patch, symmetry):
    """A patch (C, Z, Y, X) voxel by voxel."""
    shape = patch.shape[1:]
    result = np.empty(
        (len(patch), *((shape[0], shape[2], shape[1]) if symmetry.transpose else shape)),
        patch.dtype,
    )
    for voxel in product(*map(range, shape)):
        result[(slice(None), *image_of(voxel, shape, symmetry))] = patch[(slice(None), *voxel)]
    return result


def brute_force(function, patch, over, offsets):
    """The mean over symmetries of the answers about each voxel, or about each pair of voxels."""
    shape = patch.shape[1:]
    total = np.zeros((len(offsets), *shape))
    count = np.zeros((len(offsets), *shape))
    for symmetry in over:
        answer = function(mapped(patch, symmetry)[None])[0]
        said = {}  # of a pair of voxels of the patch, whichever comes first
        for voxel in product(*map(range, shape)):
            image = image_of(voxel, shape, symmetry)
            for channel, offset in enumerate(offsets):
                if offset is None:
                    said[voxel, channel] = answer[(channel, *image)]
                    continue
                other_image = tuple(i + o for i, o in zip(image, offset, strict=True))
                others = [
                    v
                    for v in neighbours(voxel, offset)
                    if image_of(v, shape, symmetry) == other_image
                ]
                if others:
                    said.setdefault(frozenset([voxel, others[0]]), answer[(channel, *image)])
        for voxel in product(*map(range, shape)):
            for channel, offset in enumerate(offsets):
                if offset is None:
                    key = (voxel, channel)
                else:
                    key = frozenset(
                        [voxel, tuple(v + o for v, o in zip(voxel, offset, strict=True))]
                    )
                if key in said:
                    total[(channel, *voxel)] += said[key]
                    count[(channel, *voxel)] += 1
    return total / np.maximum(count, 1), count


def neighbours(voxel, offset):
    """Voxels at an offset, in any order and with any signs, inside the patch or not."""
    size = sorted(map(abs, offset))
    for difference in product(
        *[sorted({-n, 0, n} | {s for m in size for s in (-m, m)}) for n in map(abs, offset)]
    ):
        if sorted(map(abs, difference)) == size:
            yield tuple(v + d for v, d in zip(voxel, difference, strict=True))


XY = symmetries("yx", transpose=True)
XYZ = symmetries("zyx", transpose=True)
MIRRORS = symmetries("zx", transpose=False)
NEAREST = [(-1, 0, 0), (0, -1, 0), (0, 0, -1)]


@pytest.mark.parametrize("over", [XY, XYZ, MIRRORS], ids=["xy", "xyz", "mirrors"])
@pytest.mark.parametrize(
    "offsets",
    [
        pytest.param([None, None], id="of voxels"),
        pytest.param(NEAREST, id="nearest neighbours"),
        pytest.param([*NEAREST, (-2, 0, 0), (0, -3, 0), (0, 0, -3)], id="long range"),
        pytest.param([(0, 0, 1), None, (0, 1, 0)], id="forward, and one of voxels"),
        pytest.param([(-1, -1, 0), (0, -1, -1)], id="diagonals, some without a partner"),
        pytest.param([(0, -1, -2)], id="one whose transpose is no channel"),
    ],
)
@pytest.mark.parametrize("make", [predictor_in_numpy, predictor_in_torch])
def test_means_are_those_of_brute_force(over, offsets, make):
    function = asymmetric(len(offsets))
    patch = np.random.default_rng(0).random((1, 3, 5, 5), np.float32)
    expected, count = brute_force(function, patch, over, offsets)
    predictor = make(function)
    device = predictor.device
    forward = augment(predictor.predict, device, over, offsets)
    with device.session():
        found = device.download(forward(device.upload(np.stack([patch, 2 * patch]))))()
    inside = count > 0  # pairs that reach beyond the patch are the network's own affair
    np.testing.assert_allclose(found[0][inside], expected[inside], rtol=1e-5)
    np.testing.assert_allclose(found[1], 2 * found[0], rtol=1e-5)
    assert np.isfinite(found).all()


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_any_offsets(data):
    offset = st.tuples(*[st.integers(-2, 2)] * 3).filter(any)
    offsets = data.draw(st.lists(offset, min_size=1, max_size=4, unique=True))
    # Two channels of one pair, an offset and its negative, may disagree: which is meant would be a
    # matter of taste.
    offsets = [o for i, o in enumerate(offsets) if tuple(-n for n in o) not in offsets[:i]]
    transpose = data.draw(st.booleans())
    over = symmetries(data.draw(st.sampled_from(["", "x", "zy", "zyx"])), transpose=transpose)
    shape = (data.draw(st.integers(1, 4)), 4, 4 if transpose else data.draw(st.integers(3, 5)))
    patch = np.random.default_rng(1).random((1, *shape), np.float32)
    function = asymmetric(len(offsets))
    expected, count = brute_force(function, patch, over, offsets)
    found = augment(function, NumpyDevice(), over, offsets)(patch[None])[0]
    np.testing.assert_allclose(found[count > 0], expected[count > 0], rtol=1e-5)


def test_every_combination_is_there_once_the_identity_first():
    for found, count in ((XY, 8), (XYZ, 16), (MIRRORS, 4), (symmetries("", transpose=False), 1)):
        assert len(set(found)) == count
        assert (found[0].flips, found[0].transpose) == ((False,) * 3, False)


def test_a_symmetric_network_is_left_as_it_is():
    """Differences of neighbouring voxels are affinities that every symmetry agrees on."""

    def differences(batch):
        result = np.zeros((len(batch), 3, *batch.shape[2:]), np.float32)
        result[:, 0, 1:] = abs(batch[:, 0, 1:] - batch[:, 0, :-1])
        result[:, 1, :, 1:] = abs(batch[:, 0, :, 1:] - batch[:, 0, :, :-1])
        result[:, 2, :, :, 1:] = abs(batch[:, 0, :, :, 1:] - batch[:, 0, :, :, :-1])
        return result

    batch = np.random.default_rng(2).random((2, 1, 4, 6, 6), np.float32)
    found = augment(differences, NumpyDevice(), XYZ, NEAREST)(batch)
    plain = differences(batch)
    for channel, inside in enumerate([np.s_[:, 1:], np.s_[:, :, 1:], np.s_[:, :, :, 1:]]):
        np.testing.assert_allclose(found[:, channel][inside], plain[:, channel][inside], rtol=1e-5)


def run(tmp_path, name, **sections):
    values = job_values(tmp_path / "in", tmp_path / name, **sections)
    assert main(["run", str(write_job(tmp_path / f"{name}.yaml", values))]) == 0
    return read_volume(tmp_path / name)


@pytest.mark.slow
def test_a_job_with_augmentation_is_another_job_and_its_bits_do_not_depend_on_the_chunks(
    tmp_path, capsys
):
    write_volume(
        tmp_path / "in", np.random.default_rng(0).integers(0, 256, (24, 48, 48), dtype=np.uint8)
    )
    model = toy("position", output_channels=2, channels=[{}, {}])
    shapes = {"patch_shape": [8, 16, 16], "augment": "xy", "batch_size": 2}
    first = run(tmp_path, "first", model=model, inference=shapes)
    other = run(tmp_path, "other", model=model, inference=shapes | {"chunk_shape": [16, 16, 48]})
    plain = run(tmp_path, "plain", model=model, inference=shapes | {"augment": "none"})
    np.testing.assert_array_equal(first, other)
    assert np.abs(first - plain).max() > 0.1
    values = job_values(tmp_path / "in", tmp_path / "plain", model=model, inference=shapes)
    assert main(["run", str(write_job(tmp_path / "again.yaml", values))]) == 2
    assert "engine.augment: xy here, none there" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["torch", pytest.param("openvino", marks=pytest.mark.slow)])
def test_a_job_on_long_affinities(tmp_path, engine):
    """The mean answer of a symmetric network is the plain one."""
    pytest.importorskip(engine)
    write_volume(
        tmp_path / "in", np.random.default_rng(0).integers(0, 256, (24, 40, 40), dtype=np.uint8)
    )
    offsets = [[-1, 0, 0], [0, -3, 0], [0, 0, -3], [0, 0, -1]]
    model = toy("differences", output_channels=4, crop_margin=[3, 3, 3], normalize="unit")
    affinities = model | {"channels": [{"affinity": offset} for offset in offsets]}
    shapes = {"patch_shape": [8, 16, 16], "batch_size": 2, "engine": engine, "augment": "xyz"}
    found = run(tmp_path, "found", model=affinities, inference=shapes)
    plain = run(tmp_path, "plain", model=model, inference=shapes | {"augment": "none"})
    np.testing.assert_allclose(found, plain, rtol=0, atol=2e-6)
    voxels = run(tmp_path, "voxels", model=model | {"channels": [{}] * 4}, inference=shapes)
    assert np.abs(voxels - plain).max() > 0.1


def test_patches_that_are_only_flipped_need_not_be_square(tmp_path):
    rng = np.random.default_rng(0)
    write_volume(tmp_path / "in", rng.integers(0, 256, (16, 16, 24), dtype=np.uint8))
    model = toy("position", output_channels=2, channels=[{}, {}], normalize="unit")
    shapes = {"patch_shape": [16, 16, 24], "patch_overlap": [0, 0, 0], "chunk_shape": [16, 16, 32]}
    flips = [
        run(tmp_path, axes or "plain", model=model, inference=shapes | {"augment": augmented})
        for axes, augmented in (("", "none"), ("zx", {"mirror": ["x", "z"]}))
    ]
    image = read_volume(tmp_path / "in").astype(np.float32)[None] / 255
    network = toy_networks.position()
    with torch.inference_mode():
        answers = [
            torch.flip(network(torch.flip(torch.from_numpy(image), axes)), axes)[0].numpy()
            for axes in ([], [2], [4], [2, 4])
        ]
    np.testing.assert_allclose(flips[0], answers[0], atol=1e-5)  # a step of exact sums
    np.testing.assert_allclose(flips[1], np.mean(answers, axis=0), atol=1e-5)
    assert np.abs(flips[1] - flips[0]).max() > 0.1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"inference": {"augment": {"mirror": ["x", "x"]}}, "model": {"channels": [{}]}},
            "names an axis twice",
        ),
        (
            {"inference": {"augment": {"mirror": ["w"]}}, "model": {"channels": [{}]}},
            "inference.augment.mirror.0",
        ),
        (
            {"inference": {"augment": {"mirror": ["x"]}}},
            "needs to know what each output channel says",
        ),
        (
            {
                "inference": {"augment": {"mirror": ["z"]}, "patch_shape": [1, 16, 16]},
                "model": {"dims": 2, "channels": [{}]},
            },
            "no z to flip",
        ),
        (
            {"inference": {"augment": "xy"}},
            r"needs to know what each output channel says: write model.channels: [{}]",
        ),
        (
            {
                "inference": {"augment": "xy", "patch_shape": [8, 16, 20]},
                "model": {"channels": [{}]},
            },
            "must be equal",
        ),
        (
            {
                "inference": {"augment": "xyz"},
                "model": {"crop_margin": [0, 2, 1], "channels": [{}]},
            },
            "must be equal",
        ),
        (
            {
                "model": {
                    "input_channels": 2,
                    "output_channels": 2,
                    "channels": [{"affinity": [0, 1, 0]}] * 2,
                }
            },
            "an offset of its own",
        ),
        (
            {"model": {"channels": [{"affinity": [0, 0, -1]}] * 2}},
            "channels describes 2, output_channels says 1",
        ),
        (
            {
                "inference": {"augment": "xyz", "patch_shape": [1, 16, 16]},
                "model": {"dims": 2, "channels": [{}]},
            },
            "no z to flip",
        ),
    ],
)
def test_what_does_not_go_together(job, capsys, sections, message):
    sections.setdefault("inference", {}).setdefault("patch_overlap", [0, 0, 0])
    assert main(["run", job(**sections)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("predictor", [predictor_in_numpy, predictor_in_torch])
def test_a_network_may_change_its_input(predictor, transpose):
    def halve(batch):
        batch *= 0.5
        batch += 0.1
        return batch.copy()

    device, forward = predictor(halve).device, predictor(halve).predict
    array = np.random.default_rng(0).random((1, 1, 4, 6, 6)).astype(np.float32)
    mean = augment(forward, device, symmetries("zyx", transpose=transpose), [None])
    answer = device.download(mean(device.upload(array.copy())))()
    np.testing.assert_allclose(answer, array * 0.5 + 0.1, rtol=1e-6)
