"""Batches that patches of waiting chunks fill up: fewer calls, and the same bits."""

import numpy as np
import pytest
from fakes.networks import NumpyNetwork, RemoteDevice, position_dependent, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chunks import cut_out, infer_all, random_volume, small_plan

from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.errors import DeviceOutOfMemory
from beam_inference.geometry.zyx import ceil_div
from beam_inference.operators.normalize import Normalization
from beam_inference.worker.chunk_inference import ChunkInference, NetworkFill, WaitingChunk
from beam_inference.worker.chunk_input import ChunkInput


def make_inference(network, batch_size=8, normalize=unchanged, **options):
    return ChunkInference(network, normalize, 2, batch_size, 64.0, **options)


def wait(inference, array, plan, index):
    work = plan.work(index)
    cutout = cut_out(array, plan, work.input_box)
    return WaitingChunk(inference, inference.start_upload(cutout, work.input_box), work)


def infer_in_turn(chunks, waiting=10**9):
    """The cores of chunks, computed in their order, while some of the next ones wait."""
    cores = []
    for place, chunk in enumerate(chunks, 1):
        others = chunks[place : place + waiting]
        result = chunk.inference.infer(
            chunk.cutout, chunk.work, waiting=lambda others=others: others
        )
        assert not chunk.cutout.predictions
        chunk.cutout.free_device_arrays()
        cores.append(result.core)
    return cores


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(st.integers(4, 17), st.integers(5, 23), st.integers(6, 29)),
    st.integers(2, 9),
    st.integers(0, 3),
    st.sampled_from([NumpyDevice, RemoteDevice]),
)
def test_the_bits_stay_whatever_waits(chunk_shape, batch_size, waiting, device):
    array = random_volume((17, 23, 29))
    plan = small_plan(chunk=chunk_shape)
    expected = infer_all(array, plan, NumpyNetwork(position_dependent), 2, batch_size, bound=64.0)
    network = NumpyNetwork(position_dependent, device=device())
    chunks = [
        wait(make_inference(network, batch_size), array, plan, index)
        for index in range(min(plan.chunks.count, 12))
    ]
    cores = infer_in_turn(chunks, waiting)
    for chunk, core in zip(chunks, cores, strict=True):
        part = chunk.work.core_box.slices_in(plan.chunks.roi)
        np.testing.assert_array_equal(core, expected[(slice(None), *part)])
    patches = sum(chunk.work.patch_count for chunk in chunks)
    alone = sum(ceil_div(chunk.work.patch_count, batch_size) for chunk in chunks)
    assert set(network.batches) == {batch_size}
    assert ceil_div(patches, batch_size) <= len(network.batches) <= alone
    if waiting == 3 and min(chunk.work.patch_count for chunk in chunks) * 3 >= batch_size:
        assert len(network.batches) == ceil_div(patches, batch_size)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"normalize": Normalization(2.0)}, {"normalize": Normalization(4.0)}),
        ({"batch_size": 8}, {"batch_size": 4}),
    ],
)
def test_chunks_that_are_treated_in_other_ways_are_not_mixed(first, second):
    array = random_volume((17, 23, 29))
    plan = small_plan()
    network = NumpyNetwork(position_dependent)
    chunks = [
        wait(make_inference(network, **options), array, plan, index)
        for index, options in enumerate([first, second])
    ]
    infer_in_turn(chunks)
    alone = sum(ceil_div(each.work.patch_count, each.inference.batch_size) for each in chunks)
    assert len(network.batches) == alone


def test_what_a_volume_ends_with_is_not_put_into_patches_of_another():
    array = random_volume((17, 23, 29))
    plans = [small_plan(chunk=(17, 23, 29)), small_plan(chunk=(17, 23, 29), start=(0, 0, 0))]
    network = NumpyNetwork(position_dependent)
    inferences = [make_inference(network, fill=NetworkFill(plan.volume, 0.5)) for plan in plans]
    chunks = [
        wait(inference, array, plan, 0) for inference, plan in zip(inferences, plans, strict=True)
    ]
    alone = [make_inference(network, fill=NetworkFill(plan.volume, 0.5)) for plan in plans]
    expected = [
        infer_in_turn([wait(inference, array, plan, 0)])[0]
        for inference, plan in zip(alone, plans, strict=True)
    ]
    for core, other in zip(infer_in_turn(chunks), expected, strict=True):
        np.testing.assert_array_equal(core, other)


def test_patches_of_one_value_are_left_to_their_turn():
    array = np.zeros((17, 23, 29), np.float32)
    array[:4, :4] = random_volume((4, 4, 29))
    plan = small_plan()
    network = NumpyNetwork(position_dependent)
    chunks = [wait(make_inference(network), array, plan, index) for index in range(4)]
    first = chunks[0]
    first.inference.infer(first.cutout, first.work, waiting=lambda: chunks[1:])
    for chunk in chunks[1:]:
        for _, index in chunk.cutout.predictions:
            box = plan.lattice.patch_box(index)
            assert np.ptp(cut_out(array, plan, box)) > 0


def test_what_was_computed_in_a_larger_batch_is_computed_again():
    array = random_volume((17, 23, 29))
    plan = small_plan()
    network = NumpyNetwork(position_dependent)
    inference = make_inference(network)
    chunks = [wait(inference, array, plan, index) for index in (0, 1)]
    inference.infer(chunks[0].cutout, chunks[0].work, waiting=lambda: chunks[1:])
    ahead = len(chunks[1].cutout.predictions)
    assert 0 < ahead < 8
    inference.batch_size = 4  # as after a batch for which the memory did not do
    network.batches.clear()
    core = inference.infer(chunks[1].cutout, chunks[1].work).core
    assert network.batches == [4] * ceil_div(chunks[1].work.patch_count, 4)
    alone = wait(make_inference(network, 4), array, plan, 1)
    np.testing.assert_array_equal(core, infer_in_turn([alone])[0])


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_patch_that_fails_is_the_fault_of_its_own_chunk_alone(error):
    array = random_volume((17, 23, 29))
    array[-1, -1, -1] = 7

    def break_down(batch):
        if (batch == 7).any():
            raise error("a seven")
        return position_dependent(batch)

    plan = small_plan(patch=(6, 8, 10), overlap=(0, 0, 0), chunk=(6, 8, 10))
    last = plan.chunks.count - 1
    inference = make_inference(NumpyNetwork(break_down))
    first, second = (wait(inference, array, plan, index) for index in (0, last))
    core = inference.infer(first.cutout, first.work, waiting=lambda: [second]).core
    assert not second.cutout.predictions
    alone = wait(make_inference(NumpyNetwork(position_dependent)), array, plan, 0)
    np.testing.assert_array_equal(core, infer_in_turn([alone])[0])
    with pytest.raises(error, match="a seven"):
        inference.infer(second.cutout, second.work)


def test_a_chunk_whose_input_finds_no_memory_beside_this_one_is_left_alone():
    array = random_volume((17, 23, 29))
    plan = small_plan()
    inference = make_inference(NumpyNetwork(position_dependent))
    first, second = (wait(inference, array, plan, index) for index in (0, 1))

    def upload():
        raise DeviceOutOfMemory("no room for a second input")

    full = WaitingChunk(
        inference, ChunkInput(second.cutout.array, second.cutout.box, upload), second.work
    )
    core = inference.infer(first.cutout, first.work, waiting=lambda: [full]).core
    assert inference.batch_size == 8
    alone = wait(make_inference(NumpyNetwork(position_dependent)), array, plan, 0)
    np.testing.assert_array_equal(core, infer_in_turn([alone])[0])
