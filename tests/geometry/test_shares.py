"""Test how arrays are divided, against windows that are counted one by one."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from beam_inference.geometry.shares import (
    TransposedWindow,
    Window,
    divide,
    even_cuts,
    intersect,
    scaled_cuts,
)

WINDOWS = st.builds(
    Window,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
)


def inputs_of(window, output):
    start = output * window.stride - window.before
    return [start + window.dilation * k for k in range(window.kernel)]


@given(WINDOWS, st.integers(1, 30), st.integers(1, 4))
def test_windows_see_what_they_must(window, length, parts):
    padded = length + window.before + window.after
    starts = range(0, padded - window.reach, window.stride)
    count = max(0, len(starts))
    assert max(0, window.out_length(length)) == count
    if not count:
        return
    cuts = window.out_cuts(even_cuts(length, parts))
    assert cuts[0] == 0
    assert cuts[-1] == count
    assert list(cuts) == sorted(cuts)
    for outputs, held in zip(pairwise(cuts), pairwise(even_cuts(length, parts)), strict=True):
        seen = {i for o in range(*outputs) for i in inputs_of(window, o)}
        start, stop = window.sees(outputs)
        assert (start, stop) == (min(seen), max(seen) + 1) if seen else start == stop
        first, last = window.inner(outputs, held, length)
        near = [
            o
            for o in range(*outputs)
            if all(held[0] <= i < held[1] for i in inputs_of(window, o) if 0 <= i < length)
            and (held[0] == 0 or min(inputs_of(window, o)) >= held[0])
            and (held[1] == length or max(inputs_of(window, o)) < held[1])
        ]
        if held[0] < held[1]:
            assert list(range(first, last)) == near


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1))
def test_pools_that_hang_over_the_end(length, kernel, stride, padding):
    padding = min(padding, kernel // 2)
    if length + 2 * padding < kernel:
        return
    window = Window(kernel, stride, before=padding, after=padding, ceil=True)
    pooled = functional.max_pool1d(
        torch.zeros(1, 1, length), kernel, stride, padding, ceil_mode=True
    )
    assert window.out_length(length) == pooled.shape[-1]


@given(
    st.builds(
        TransposedWindow,
        kernel=st.integers(1, 4),
        stride=st.integers(1, 5),
        dilation=st.integers(1, 2),
        padding=st.integers(0, 3),
    ),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_transposed_windows_see_what_they_must(window, length, parts):
    count = window.out_length(length)
    if count < 1:
        return
    cuts = window.out_cuts(even_cuts(length, parts))
    assert cuts[0] == 0
    assert cuts[-1] == count
    assert list(cuts) == sorted(cuts)
    for outputs in pairwise(cuts):
        start, stop = window.sees(outputs, length)
        if outputs[0] < outputs[1]:
            assert start * window.stride - window.padding <= outputs[0]
        for i in range(length):
            given_to = {
                i * window.stride - window.padding + window.dilation * k
                for k in range(window.kernel)
            }
            if given_to & set(range(*outputs)):
                assert start <= i < stop


@given(st.tuples(*[st.integers(0, 9)] * 3), st.tuples(*[st.integers(1, 3)] * 3))
def test_members_hold_each_voxel_once(shape, parts):
    count = np.zeros(shape, int)
    boxes = divide(shape, parts).boxes
    for box in boxes:
        count[tuple(slice(a, b) for a, b in box)] += 1
    assert (count == 1).all()
    assert all(intersect(a, b) is None for a in boxes for b in boxes if a is not b)


def test_cuts_of_a_part_and_of_a_scaled_axis():
    division = divide((10, 7, 4), (2, 1, 2)).crop(((2, 9), (1, 6), (3, 4)))
    assert division.cuts == ((0, 3, 7), (0, 5), (0, 0, 1))
    assert scaled_cuts((0, 3, 7), 14) == (0, 6, 14)
    assert scaled_cuts((0, 3, 7), 3) == (0, 1, 3)
