import pytest

from beam_inference.memory import CACHED_CUTOUTS, KEPT_BYTES, blocks_touched, projected_memory

BASE = {
    "input_shape": (20, 100, 100),
    "core_shape": (16, 96, 96),
    "patch_input_shape": (10, 50, 50),
    "input_channels": 1,
    "output_channels": 3,
    "input_itemsize": 1,
    "input_blocks_bytes": 7000,
    "output_itemsize": 1,
    "batch_size": 2,
    "working_set_bytes": 10**6,
    "threads": 2,
    "look_ahead": 1,
    "trailing_writes": 1,
    "device_is_host": True,
    "mask_piece_bytes": 500,
    "mask_bytes": 9000,
}


def test_the_sum_by_hand():
    cutout, core, patches = 20 * 100 * 100, 16 * 96 * 96, (2 * (1 + 3) + 3 * 3) * 10 * 50 * 50 * 4
    slab = 3 * 10 * 96 * 96 * 4
    projection = projected_memory(**BASE)
    assert projection.device_bytes == cutout + slab + patches + 10**6
    assert (
        projection.host_bytes
        == KEPT_BYTES
        + 2 * 3 * cutout
        + (2 + CACHED_CUTOUTS) * 7000
        + 2 * 3 * 3 * core
        + slab
        + patches
        + 10**6
        + 2 * 500
        + 9000
    )


@pytest.mark.parametrize(("n", "b"), [(1, 1), (1, 8), (2, 8), (8, 8), (9, 8), (10, 8), (64, 8), (65, 8)])
def test_blocks_touched_is_the_most_over_all_places(n, b):
    most = max((start + n - 1) // b - start // b + 1 for start in range(b)) * b
    assert blocks_touched((n, n, 1), (b, b, 1)) == (most, most, 1)


def test_a_gpu_takes_the_batch_and_the_working_set_off_the_host():
    on_gpu = projected_memory(**BASE | {"device_is_host": False})
    assert on_gpu.host_bytes < projected_memory(**BASE).host_bytes
    assert on_gpu.device_bytes == projected_memory(**BASE).device_bytes


def test_more_threads_share_one_accumulator():
    four, two = projected_memory(**BASE | {"threads": 4}), projected_memory(**BASE)
    assert four.device_bytes == two.device_bytes
    assert four.host_bytes - two.host_bytes == 2 * (3 * 20 * 100 * 100 + 7000 + 3 * 3 * 16 * 96 * 96 + 500)


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes on an idle machine
def test_the_projection_is_near_what_a_worker_is_measured_to_use():
    """A whole worker in a process of its own: the peak over what it held before the first chunk.

    Most of it is the network's working set, itself measured on one batch, so two runs differ by a tenth.
    """
    from benchmarks.bench import memory_against_projection

    measured = memory_against_projection()
    assert 0.5 < measured["ratio"] <= 1, measured
