"""Test that thresholds in another unit than the volume's are refused, with the number to write."""

import numpy as np
import pytest

from beam_inference.errors import ConfigError
from beam_inference.segmentation.thresholds import check_separates, check_threshold

URL = "memory://volume"


def check(threshold, dtype, **options):
    check_threshold("--threshold", threshold, np.dtype(dtype), URL, **options)


@pytest.mark.parametrize(
    ("threshold", "dtype"),
    [
        *((1, "uint8"), (255, "uint8"), (127.5, "uint8"), (0, "uint8"), (65535, "uint16")),
        *((-200, "int16"), (2**53, "uint64"), (0.6, "float32"), (128, "float32"), (-3, "float16")),
    ],
)
def test_thresholds_that_values_can_reach_are_accepted(threshold, dtype):
    check(threshold, dtype)


@pytest.mark.parametrize(
    ("threshold", "dtype", "advice"),
    [
        (0.6, "uint8", "--threshold 153 if 0 to 1 is stored as 0 to 255, or --threshold 1 if"),
        (0.5, "uint16", "--threshold 32768 if 0 to 1 is stored as 0 to 65535"),
        (0.5, "uint64", "Write --threshold 1 if that is what you mean"),
        (-0.5, "int16", "separate what is less than 0 from the rest. Write --threshold 0 if"),
        (999, "uint8", "values from 0 to 255.*Write a number from 0 to 255"),
        (-1, "uint8", "values from 0 to 255.*Write a number from 0 to 255"),
        (70000, "float16", "holds float16, values from -65504"),
        (float("nan"), "float32", "nan is no number"),
        (float("-inf"), "uint8", "-inf is no number"),
    ],
)
def test_thresholds_in_another_unit_are_refused(threshold, dtype, advice):
    with pytest.raises(ConfigError, match=advice):
        check(threshold, dtype)


def test_one_above_the_range_excludes_all_where_that_makes_sense():
    check(256, "uint8", may_exclude_all=True)
    with pytest.raises(ConfigError, match="from 0 to 255, or 256 for a limit that none reaches"):
        check(257, "uint8", may_exclude_all=True)
    with pytest.raises(ConfigError):
        check(256, "uint8")


def test_what_every_value_reaches_separates_nothing():
    check_separates("--threshold", 1, np.dtype("uint8"), URL)
    check_separates("--threshold", -1e30, np.dtype("float32"), URL)
    check_separates("--threshold", 0, np.dtype("int16"), URL)
    with pytest.raises(ConfigError, match="the whole volume would be foreground. Write a number f"):
        check_separates("--threshold", 0, np.dtype("uint8"), URL)
