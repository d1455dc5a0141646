from itertools import product

import numpy as np
import pytest
import torch
from fakes.networks import NumpyNetwork, RemoteDevice, position_dependent, unchanged
from helpers import oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out, infer, infer_all, infer_once, random_volume, small_plan

from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.torch_forward import torch_predictor
from beam_inference.errors import DeviceOutOfMemory, ModelContractError, NonFiniteError
from beam_inference.geometry.blending import BUMP, axis_weights
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import largest_rounding, step_of
from beam_inference.geometry.zyx import ceil_div
from beam_inference.operators.quantize import quantize
from beam_inference.worker.chunk_inference import UNIFORM_ANSWERS, ChunkInference


@pytest.mark.parametrize("batch_size", [1, 4])
def test_all_chunk_shapes_give_the_same_bits_and_the_oracles_values(batch_size):
    array = random_volume((17, 23, 29))
    results = [
        infer_all(array, small_plan(chunk=chunk), NumpyNetwork(position_dependent), 2, batch_size)
        for chunk in [(17, 23, 29), (5, 9, 13), (7, 11, 3), (1, 23, 4)]
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    plan = small_plan()
    expected, _ = oracle(
        plan.lattice,
        lambda box: position_dependent(cut_out(array, plan, box)[None].astype(np.float32))[0],
        2,
    )
    assert np.abs(results[0] - expected).max() <= 1e-6 * np.ptp(expected)


def test_crop_differs_at_chunk_borders_and_only_with_a_network_that_sees_its_patch():
    array = random_volume((17, 23, 29))
    exact = infer_all(array, small_plan(), NumpyNetwork(position_dependent), 2)
    crop = small_plan(strategy="crop", chunk_crop_margin=(1, 2, 2))
    assert np.abs(infer_all(array, crop, NumpyNetwork(position_dependent), 2) - exact).max() > 0.1
    identity = infer_all(array, crop, NumpyNetwork(), 1, bound=1.0)
    np.testing.assert_allclose(identity[0], array, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_identity_gives_the_input_back_for_any_geometry(data):
    patch = data.draw(st.tuples(*[st.integers(1, 7)] * 3))
    overlap = tuple(data.draw(st.integers(0, p - 1)) for p in patch)
    plan = small_plan(
        shape=data.draw(st.tuples(*[st.integers(1, 12)] * 3)),
        patch=patch,
        overlap=overlap,
        chunk=data.draw(st.tuples(*[st.integers(1, 13)] * 3)),
        crop_margin=data.draw(st.tuples(*[st.integers(0, 3)] * 3)),
        strategy=data.draw(st.sampled_from(["recompute", "crop"])),
        chunk_crop_margin=data.draw(st.tuples(*[st.integers(0, 4)] * 3)),
    )
    array = np.random.default_rng(2).integers(0, 256, plan.volume.shape, dtype=np.uint8)
    result = infer_all(
        array / np.float32(255),
        plan,
        NumpyNetwork(),
        batch_size=data.draw(st.integers(1, 3)),
        bound=1.0,
    )[0]
    # A chunk's own lattice, with crop, may end otherwise than the plan's.
    terms = np.prod([p // (p - o) + 2 for o, p in zip(overlap, patch, strict=True)])
    is_common = all(o <= p / 2 for o, p in zip(overlap, patch, strict=True))
    allowed = 1e-6 if is_common else 4e-7 + largest_rounding(1.0, int(terms))
    assert np.abs(result - array / 255).max() <= allowed
    np.testing.assert_array_equal(quantize(result, np.dtype("uint8"), (0, 1)), array)


@pytest.mark.parametrize(
    ("length", "patch", "overlap"),
    [
        (700, 256, 0),
        (700, 256, 64),
        (700, 256, 192),
        (300, 256, 255),
        (4500, 2048, 512),
        (4500, 2048, 1536),
    ],
)
def test_identity_with_long_patches(length, patch, overlap):
    plan = small_plan((2, 3, length), (2, 3, patch), (0, 0, overlap), (2, 3, 301))
    array = np.random.default_rng(3).integers(0, 256, plan.volume.shape, dtype=np.uint8)
    result = infer_all(array / np.float32(255), plan, NumpyNetwork(), bound=1.0)[0]
    allowed = 4e-7 + largest_rounding(1.0, plan.lattice.most_patches)
    assert np.abs(result - array / 255).max() <= (1e-6 if overlap <= patch / 2 else allowed)
    np.testing.assert_array_equal(quantize(result, np.dtype("uint8"), (0, 1)), array)


def test_every_call_has_exactly_the_batch_size_and_every_patch_is_computed_once():
    plan = small_plan(chunk=(17, 23, 29))
    network = NumpyNetwork()
    infer_all(random_volume((17, 23, 29)), plan, network, batch_size=3)
    assert plan.lattice.count % 3 == 2
    assert network.batches == [3] * ceil_div(plan.lattice.count, 3)


def test_a_network_may_return_the_grown_patch_or_the_cropped_one():
    array = random_volume((17, 23, 29))
    plan = small_plan(crop_margin=(1, 2, 3))
    grown = infer_all(array, plan, NumpyNetwork())
    cropped = infer_all(array, plan, NumpyNetwork(lambda batch: batch[:, :, 1:-1, 2:-2, 3:-3]))
    np.testing.assert_array_equal(grown, cropped)


def test_the_patch_input_is_grown_by_real_voxels_also_outside_the_roi():
    """A network that looks two voxels ahead sees them: across chunk borders, and beyond the ROI."""
    array = random_volume((17, 23, 29))
    volume = small_plan().volume
    roi = BoundingBox(volume.start, (volume.stop[0], volume.stop[1], volume.stop[2] - 5))
    plan = small_plan(roi=roi, crop_margin=(0, 0, 2))
    result = infer_all(array, plan, NumpyNetwork(lambda batch: batch[:, :, :, :, 4:]), bound=1.0)
    np.testing.assert_allclose(result[0], array[:, :, 2:-3], atol=1e-6)


def test_several_input_channels():
    array = np.stack([random_volume((17, 23, 29)), 2 + random_volume((17, 23, 29))])
    plan = small_plan(chunk=(20, 30, 30))
    work = plan.work(0)
    network = NumpyNetwork(lambda batch: batch[:, 1:] - batch[:, :1])
    core = infer_once(array, work, network, 1, 2, bound=2.0).core
    np.testing.assert_allclose(core[0], array[1] - array[0], atol=1e-6)


def test_out_of_memory_halves_the_batch_and_goes_on():
    array = random_volume((17, 23, 29))
    plan = small_plan(chunk=(17, 23, 29))
    network = NumpyNetwork(position_dependent, largest_batch=3)
    work = plan.work(0)
    result = infer_once(cut_out(array, plan, work.input_box), work, network, 2, 8)
    assert result.batch_size == 2
    assert set(network.batches) == {2}
    expected = infer_all(array, plan, NumpyNetwork(position_dependent), 2, batch_size=2)
    np.testing.assert_allclose(result.core, expected, atol=1e-5)


def test_out_of_memory_at_one_patch_names_the_numbers():
    plan = small_plan(chunk=(17, 23, 29))
    work = plan.work(0)
    array = cut_out(random_volume((17, 23, 29)), plan, work.input_box)
    with pytest.raises(
        DeviceOutOfMemory, match=r"batch of one patch of \[6, 8, 10\] .* chunk of \[17, 23, 29\]"
    ):
        infer_once(array, work, NumpyNetwork(largest_batch=0), 1, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda b: b[:, :, 1:],
        lambda b: np.concatenate([b, b], 1),
        lambda b: b[0],
        lambda b: b[:, :, :, :, :0],
    ],
)
def test_a_wrong_output_shape_is_named(function):
    plan = small_plan()
    work = plan.work(0)
    array = cut_out(random_volume((17, 23, 29)), plan, work.input_box)
    with pytest.raises(
        ModelContractError, match=r"returns an array of shape .* expected \[1, 1, 6, 8, 10\]"
    ):
        infer_once(array, work, NumpyNetwork(function))


def test_normalisation_sees_stored_values_as_float32():
    plan = small_plan(chunk=(17, 23, 29))
    array = np.random.default_rng(4).integers(0, 60000, (17, 23, 29)).astype(np.uint16)
    work = plan.work(0)
    core = infer_once(
        cut_out(array, plan, work.input_box),
        work,
        NumpyNetwork(),
        normalize=lambda b: b.__imul__(0.5),
        bound=2.0**15,
    ).core
    np.testing.assert_allclose(core[0], array / 2, rtol=1e-6, atol=1e-6 * 2**15)


def test_a_cutout_of_another_box_is_refused():
    work = small_plan().work(0)
    with pytest.raises(ValueError, match="the cutout has shape"):
        infer_once(np.zeros((1, 2, 2, 2)), work, NumpyNetwork())


STEP = np.float32(step_of(64.0))


def whole(array, plan, function, channels):
    """All patches blended into an accumulator as large as the ROI, by the same operations."""
    roi = plan.chunks.roi
    lattice = plan.lattice
    result = np.zeros((channels, *roi.shape), np.float32)
    for index in product(*(range(axis.count) for axis in lattice.axes)):
        box = lattice.patch_box(index)
        if box.intersection(roi).size == 0:
            continue
        prediction = function(cut_out(array, plan, box)[None].astype(np.float32))[0]
        z, y, x = (axis_weights(a, k, BUMP) for a, k in zip(lattice.axes, index, strict=True))
        in_steps = z * np.float32(1 / STEP)
        part = np.rint(prediction * ((y[:, None] * x) * in_steps[:, None, None])) * STEP
        here = box.intersection(roi)
        result[(slice(None), *here.slices_in(roi))] += part[(slice(None), *here.slices_in(box))]
    return result


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_slab_gives_the_bits_of_an_accumulator_for_all(data):
    patch = data.draw(st.tuples(*[st.integers(1, 6)] * 3))
    plan = small_plan(
        shape=data.draw(st.tuples(st.integers(1, 25), st.integers(1, 9), st.integers(1, 9))),
        patch=patch,
        overlap=tuple(data.draw(st.integers(0, p - 1)) for p in patch),
        chunk=data.draw(st.tuples(st.integers(1, 25), st.integers(1, 9), st.integers(1, 9))),
    )
    array = random_volume(plan.volume.shape)
    for device in (NumpyDevice(), RemoteDevice()):
        network = NumpyNetwork(position_dependent, device=device)
        found = infer_all(array, plan, network, 2, data.draw(st.integers(1, 3)))
        np.testing.assert_array_equal(found, whole(array, plan, position_dependent, 2))


def with_complement(batch):
    return np.concatenate([batch, 1 - batch], 1)


def torch_network():
    return torch_predictor(lambda batch: torch.cat([batch, 1 - batch], 1), torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("value_range", [(0.0, 1.0), (-0.3, 0.7)])
def test_values_are_encoded_where_they_are_to_the_same_bits(dtype, value_range):
    array = random_volume((17, 23, 29))
    plan = small_plan(chunk=(9, 23, 29))
    encoding = Encoding(np.dtype(dtype), None if dtype == "float32" else value_range)
    for network in (
        *(NumpyNetwork(with_complement, device=each) for each in (NumpyDevice(), RemoteDevice())),
        torch_network(),
    ):
        for index in range(plan.chunks.count):
            work = plan.work(index)
            arguments = (cut_out(array, plan, work.input_box), work, network, 2, 2)
            plain = infer_once(*arguments).core
            encoded = infer_once(*arguments, encoding).core
            assert encoded.dtype == dtype
            np.testing.assert_array_equal(encoded, quantize(plain, *encoding))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_before_it_is_rounded_away(value):
    def broken(call):
        def function(batch):
            batch = batch.copy()
            if len(network.batches) == call:
                batch[-1, 0, 5, 7, 9] = value
            return batch

        return function

    plan = small_plan(chunk=(17, 23, 29))
    array = cut_out(random_volume((17, 23, 29)), plan, plan.work(0).input_box)
    encodings = (AS_COMPUTED, Encoding(np.dtype("uint8"), (0, 1)))
    last = ceil_div(plan.lattice.count, 2)
    for encoding, device, call in product(encodings, (NumpyDevice, RemoteDevice), (1, last)):
        network = NumpyNetwork(broken(call), device=device())
        with pytest.raises(NonFiniteError):
            infer_once(array, plan.work(0), network, 1, 2, encoding)


def padded_volume():
    """Background of two values around a little texture."""
    array = np.zeros((17, 23, 29), np.uint8)
    array[:, :, 15:] = 7
    array[4:9, 5:12, 3:12] = np.random.default_rng(5).integers(0, 256, (5, 7, 9))
    return array


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("chunk", [(17, 23, 29), (5, 9, 13)])
def test_uniform_patches_are_computed_once_and_the_bits_stay(batch_size, chunk):
    array = padded_volume()
    plan = small_plan(chunk=chunk)
    network = NumpyNetwork(position_dependent)
    inference = ChunkInference(network, unchanged, 2, batch_size, 2048.0)
    counted = 0
    result = np.zeros((2, 17, 23, 29), np.float32)
    for index in range(plan.chunks.count):
        work = plan.work(index)
        found = infer(inference, cut_out(array, plan, work.input_box), work)
        result[(slice(None), *work.core_box.slices_in(plan.chunks.roi))] = found.core
        counted += found.uniform_patches
    assert set(inference.answers) == {(batch_size, b"|u1\0"), (batch_size, b"|u1\7")}
    uniform = sum(
        np.ptp(cut_out(array, plan, plan.lattice.patch_box(i))) == 0 for i in all_patches(plan)
    )
    if plan.chunks.count == 1:
        assert counted == uniform > 20
        assert len(network.batches) == 2 + ceil_div(plan.lattice.count - uniform, batch_size)
    computed = infer_all(
        array,
        plan,
        NumpyNetwork(position_dependent),
        2,
        batch_size,
        bound=2048.0,
        uniform_answers=0,
    )
    np.testing.assert_array_equal(result, computed)


def all_patches(plan):
    return product(*(range(axis.count) for axis in plan.lattice.axes))


def test_a_chunk_of_nothing_but_background_costs_no_call_once_its_answer_is_known():
    plan = small_plan()
    network = NumpyNetwork()
    inference = ChunkInference(network, unchanged, 1, 4, 4.0)
    array = np.full((17, 23, 29), 3, np.uint8)
    for index in range(plan.chunks.count):
        work = plan.work(index)
        found = infer(inference, cut_out(array, plan, work.input_box), work)
        np.testing.assert_allclose(found.core, 3, rtol=1e-6)
        assert found.uniform_patches == work.patch_count
    assert network.batches == [4]


def test_values_beyond_the_few_that_are_kept_and_nan_are_computed():
    plan = small_plan(patch=(1, 8, 10), overlap=(0, 0, 0), chunk=(17, 23, 29))
    work = plan.work(0)
    array = np.broadcast_to(np.arange(17, dtype=np.float32)[:, None, None], (17, 23, 29))
    cutout = cut_out(array, plan, work.input_box)
    found = infer_once(cutout, work, NumpyNetwork(), 1, 2, bound=16.0)
    np.testing.assert_allclose(found.core[0], array, rtol=1e-6)
    assert found.uniform_patches == UNIFORM_ANSWERS * work.patch_count / 17
    nothing = np.full((17, 23, 29), np.nan, np.float32)
    with pytest.raises(NonFiniteError):
        infer_once(cut_out(nothing, plan, work.input_box), work, NumpyNetwork(), 1, 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_network_may_tell_the_two_zeros_apart(dtype, mixed):
    array = np.zeros((17, 23, 29), dtype)
    array[:, :, 13:] = -0.0
    if mixed:  # as a volume that was multiplied by a mask has them
        array[np.random.default_rng(0).random(array.shape) < 0.5] *= -1
    plan = small_plan(chunk=(17, 23, 29))
    work = plan.work(0)
    network = NumpyNetwork(lambda batch: np.copysign(np.float32(1), batch))
    found = infer_once(cut_out(array, plan, work.input_box), work, network, 1, 2, bound=1.0)
    np.testing.assert_allclose(found.core[0], np.copysign(1, array), atol=1e-6)
    assert (found.uniform_patches > 0) is not mixed


def test_channels_are_uniform_each_in_its_own_value():
    plan = small_plan(chunk=(17, 23, 29))
    array = np.stack(
        [np.full((17, 23, 29), 2.0, np.float32), np.full((17, 23, 29), 5.0, np.float32)]
    )
    network = NumpyNetwork(lambda b: b[:, 1:] - b[:, :1])
    found = infer_once(array, plan.work(0), network, 1, 2, bound=4.0)
    np.testing.assert_allclose(found.core, 3, rtol=1e-6)
    assert found.uniform_patches == plan.lattice.count


def test_a_halved_batch_forgets_the_answers_of_the_larger_one():
    plan = small_plan(chunk=(17, 23, 29))
    work = plan.work(0)
    network = NumpyNetwork(position_dependent, largest_batch=2)
    inference = ChunkInference(network, unchanged, 2, 8, 2048.0)
    inference.answers[8, b"|u1\0"] = "of another batch size"
    found = infer(inference, cut_out(padded_volume(), plan, work.input_box), work)
    assert (found.batch_size, set(network.batches)) == (2, {2})
    assert set(inference.answers) == {(2, b"|u1\0"), (2, b"|u1\7")}


@pytest.mark.parametrize("device", [NumpyDevice, RemoteDevice])
def test_patches_beyond_the_bound_are_counted_and_those_at_it_are_not(device):
    plan = small_plan(chunk=(17, 23, 29))
    array = np.zeros((17, 23, 29), np.float32)
    array[0, 0, 0] = -4.0
    array[16, 22, 28] = 4.0
    cutout = cut_out(array, plan, plan.work(0).input_box)
    for bound, expected in ((4.0, 0), (2.0, 2), (1.0, 2)):
        result = infer_once(cutout, plan.work(0), NumpyNetwork(device=device()), 1, 2, bound=bound)
        assert result.patches_beyond_bound == expected
