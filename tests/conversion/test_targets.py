"""Files as targets: exact round trips, what other libraries read, and what is refused."""

import tracemalloc
from dataclasses import dataclass, replace

import h5py
import numpy as np
import pytest
from helpers import write_volume
from source_volumes import assert_holds, random_array, source_of

from beam_inference.conversion.convert import plan_conversion
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.options import ConversionOptions
from beam_inference.conversion.protocol import SourceInfo
from beam_inference.conversion.targets import (
    FILE_FORMATS,
    check_file_can_hold,
    fill_file,
    format_of,
)
from beam_inference.errors import ConfigError, PermanentReadError, StateError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid

NAMES = ["a.tif", "a.h5", "a.nii", "a.nii.gz", "a.nrrd", "a.mrc", "a.npy", "png"]
SIZE = (40.0, 4.0, 7.16)
START = (3, -5, 70_001)
VOLUMES = [
    ("uint8", 1),
    ("uint16", 1),
    ("uint64", 1),
    ("float32", 3),
    ("uint8", 3),
    ("int8", 2),
    ("float64", 1),
]


def spec_for(format, array, start=START, size=SIZE):
    """The spec of as much of an array (channels, z, y, x) as a file of a format can hold."""
    kind = FILE_FORMATS[format]
    start = start if kind.has_offset else (0, 0, 0)
    box = BoundingBox(start, tuple(a + n for a, n in zip(start, array.shape[1:], strict=True)))
    return FileSpec(box, array.shape[0], array.dtype.name, size if kind.has_voxel_size else None)


def write(path, format, spec, array, chunk=(4, 8, 32)):
    """Write an array window by window."""
    with fill_file(str(path), format, spec, None) as target:
        for index in range((grid := ChunkGrid(spec.bounds, chunk)).count):
            box = grid.core_box(index)
            target.put(box, array[(slice(None), *box.slices_in(spec.bounds))])
        assert sum(1 for _ in target.finish()) == target.steps


@pytest.mark.parametrize(("dtype", "channels"), VOLUMES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_round_trips(tmp_path, name, dtype, channels):
    format = format_of(name) or "png"
    array = random_array(dtype, (channels, 9, 20, 31))
    spec = spec_for(format, array)
    path = tmp_path / name
    held = dtype in FILE_FORMATS[format].dtypes and (
        channels == 1 or format not in ("mrc", "png") or dtype == "uint8"
    )
    if not held or (format == "mrc" and channels > 1):
        with pytest.raises(VolumeError, match="values are never converted here. Formats that do: "):
            check_file_can_hold(str(path), format, spec, [])
        return
    check_file_can_hold(str(path), format, spec, [])
    write(path, format, spec, array)
    assert_holds(source_of(path), array, spec.voxel_size_nm, spec.bounds.start)
    assert [each.name for each in tmp_path.iterdir()] == [name], "nothing else is left"


def test_every_dtype_has_a_file_that_holds_it():
    for dtype in (
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
    ):
        assert sum(dtype in kind.dtypes for kind in FILE_FORMATS.values()) >= 2


def test_other_libraries_read_the_same(tmp_path):
    import mrcfile
    import nibabel
    import nrrd
    import tifffile
    from PIL import Image

    array = random_array("uint16", (1, 9, 20, 31))
    for name in NAMES:
        write(
            tmp_path / name,
            format_of(name) or "png",
            spec_for(format_of(name) or "png", array),
            array,
        )
    found = {
        "a.tif": tifffile.imread(tmp_path / "a.tif"),
        "a.h5": h5py.File(tmp_path / "a.h5")["main"][:],
        "a.nii": np.asanyarray(nibabel.load(tmp_path / "a.nii").dataobj).T,
        "a.nii.gz": np.asanyarray(nibabel.load(tmp_path / "a.nii.gz").dataobj).T,
        "a.nrrd": nrrd.read(str(tmp_path / "a.nrrd"), index_order="C")[0],
        "a.mrc": mrcfile.read(tmp_path / "a.mrc"),
        "a.npy": np.load(tmp_path / "a.npy"),
        "png": np.stack(
            [np.asarray(Image.open(tmp_path / "png" / f"{z:04d}.png")) for z in range(9)]
        ),
    }
    for name in NAMES:
        np.testing.assert_array_equal(found[name], array[0], err_msg=name)
    with Image.open(tmp_path / "a.tif") as image:
        assert image.n_frames == 9
    assert mrcfile.validate(tmp_path / "a.mrc")
    affine = nibabel.load(tmp_path / "a.nii").affine
    np.testing.assert_allclose(affine[:3, 3], [70_001 * 7.16e-3, -5 * 4e-3, 3 * 40e-3], rtol=1e-6)


def test_long_axes_are_nifti_2(tmp_path):
    import nibabel

    array = random_array("uint8", (1, 1, 2, 40_000))
    write(tmp_path / "a.nii", "nifti", spec_for("nifti", array), array, (1, 2, 40_000))
    assert isinstance(nibabel.load(tmp_path / "a.nii"), nibabel.Nifti2Image)
    assert_holds(source_of(tmp_path / "a.nii"), array, SIZE, START)


def test_large_tiffs_are_bigtiffs_and_sparse_until_filled(tmp_path):
    import tifffile

    array = random_array("uint8", (1, 1, 8, 8))
    spec = FileSpec(BoundingBox((0, 0, 0), (5, 30_000, 30_000)), 1, "uint8", SIZE)
    corner = BoundingBox((4, 29_992, 29_992), (5, 30_000, 30_000))
    tracemalloc.start()
    with fill_file(str(tmp_path / "a.tif"), "tiff", spec, None) as target:
        target.put(corner, array)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        assert tiff.is_bigtiff
        assert len(tiff.pages) == 5
    np.testing.assert_array_equal(source_of(tmp_path / "a.tif").open()(corner), array)


def test_what_would_be_lost_is_named_with_what_accepts_it(tmp_path):
    array = random_array("uint8", (1, 9, 20, 31))
    box = BoundingBox((3, -5, 2), (12, 15, 33))
    spec = FileSpec(box, 1, "uint8", SIZE)
    with pytest.raises(
        VolumeError, match=r"the offset 3,-5,2 \(z, y, x\), which would be lost.* --drop offset$"
    ):
        check_file_can_hold("a.tif", "tiff", spec, [])
    check_file_can_hold("a.tif", "tiff", spec, ["offset"])
    with pytest.raises(VolumeError, match="voxel size 40,4,7.16 nm.*--drop offset,voxel-size$"):
        check_file_can_hold("a.npy", "npy", spec, ["offset"])
    check_file_can_hold("a.npy", "npy", spec, ["offset", "voxel-size"])
    with pytest.raises(ConfigError, match="ends with .nii or .nii.gz"):
        check_file_can_hold("a.img", "nifti", spec, [])
    with pytest.raises(ConfigError, match="needs --voxel-size"):
        check_file_can_hold("a.nrrd", "nrrd", FileSpec(box, 1, "uint8", None), ["voxel-size"])
    write(tmp_path / "a.npy", "npy", spec, array)
    assert_holds(source_of(tmp_path / "a.npy"), array)


@pytest.mark.parametrize("name", NAMES)
def test_what_fails_leaves_nothing(tmp_path, name):
    array = random_array("uint16", (1, 9, 20, 31))
    format = format_of(name) or "png"
    spec = spec_for(format, array)
    with (
        pytest.raises((ValueError, TypeError), match="broadcast"),
        fill_file(str(tmp_path / name), format, spec, None) as target,
    ):
        target.put(spec.bounds, array[:, :7])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    array = random_array("uint16", (1, 9, 20, 31))
    with pytest.raises(VolumeError, match="cannot write .*No such file"):
        write(tmp_path / "nowhere" / "a.npy", "npy", spec_for("npy", array), array)
    huge = FileSpec(BoundingBox((0, 0, 0), (10**6, 10**6, 10**6)), 1, "uint8", None)
    with (
        pytest.raises(VolumeError, match="needs 888 PiB, and .* left"),
        fill_file(str(tmp_path / "a.npy"), "npy", huge, None),
    ):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_another_process_writes_is_left_to_it(tmp_path, name):
    """Its draft was taken for one that a killed process had left, and removed."""
    array = random_array("uint16", (1, 9, 20, 31))
    format = format_of(name) or "png"
    spec = spec_for(format, array)
    with fill_file(str(tmp_path / name), format, spec) as target:
        target.put(spec.bounds, array)
        with (
            pytest.raises(StateError, match=f"another process writes {tmp_path / name}"),
            fill_file(str(tmp_path / name), format, spec),
        ):
            pass
        for _ in target.finish():
            pass
    source = source_of(tmp_path / name)
    np.testing.assert_array_equal(source.open()(source.info.bounds), array)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_another_process_has_written_since_is_not_replaced(tmp_path):
    write_volume(tmp_path / "in", random_array("uint8", (1, 9, 20, 31)))
    options = ConversionOptions(drop=("offset", "voxel-size"))
    plan = plan_conversion(str(tmp_path / "in"), str(tmp_path / "a.npy"), options)
    (tmp_path / "a.npy").write_bytes(b"of the other one")
    with pytest.raises(StateError, match="exists: choose another name"):
        plan.run()
    assert (tmp_path / "a.npy").read_bytes() == b"of the other one"


@dataclass(frozen=True)
class GoneSource:
    """A source of which a file is gone when it is read."""

    info: SourceInfo

    def open(self):
        def read(box):
            raise FileNotFoundError(2, "No such file or directory", "s7.tif")

        return read


def test_a_source_that_is_gone_is_not_blamed_on_the_target(tmp_path):
    write_volume(tmp_path / "in", random_array("uint8", (1, 9, 20, 31)))
    options = ConversionOptions(drop=("offset", "voxel-size"))
    plan = plan_conversion(str(tmp_path / "in"), str(tmp_path / "a.npy"), options)
    gone = replace(plan, source=GoneSource(plan.source.info))
    with pytest.raises(PermanentReadError, match=r"cannot read .*in: .*No such file.*s7\.tif"):
        gone.run()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
