"""Volumes in files as other programs wrote them: voxels, sizes, offsets, and what is refused."""

import json
import struct
import zlib

import h5py
import numpy as np
import pytest
import tifffile
from foreign_files import mrc_bytes, nifti_bytes, nrrd_bytes, write_file
from hypothesis import given
from hypothesis import strategies as st
from source_volumes import assert_holds, random_array, source_of

from beam_inference.conversion.protocol import as_czyx
from beam_inference.errors import ConfigError, PermanentReadError, VolumeError


@given(st.permutations("CZYX"))
def test_axes_in_any_order(axes):
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    stored = array.transpose(["CZYX".index(axis) for axis in axes])
    np.testing.assert_array_equal(as_czyx(stored, "".join(axes)), array)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("order", "<>")
def test_nifti(tmp_path, name, order):
    array = random_array("int16")
    content = nifti_bytes(array, (0.5, 0.25, 2.0), origin=(1.0, -0.5, 4.0), order=order)
    assert_holds(
        source_of(write_file(tmp_path / name, content)), array, (2e6, 0.25e6, 0.5e6), (2, -2, 2)
    )


def test_nifti_in_micrometres_with_channels(tmp_path):
    array = random_array("uint64", (3, 4, 5, 6))
    assert_holds(
        source_of(write_file(tmp_path / "a.nii", nifti_bytes(array, (4, 4, 40), unit=3))),
        array,
        (4e4, 4e3, 4e3),
    )


@pytest.mark.parametrize(
    ("matrix", "origin", "note"),
    [
        (np.diag([-1.0, 1, 1]), (9, 0, 0), "turned or flipped"),
        (np.eye(3), (0.5, 0, 0), "between voxels"),
    ],
)
def test_a_position_that_is_not_kept_is_told(tmp_path, matrix, origin, note):
    array = random_array("uint8")
    source = source_of(
        write_file(tmp_path / "a.nii", nifti_bytes(array, (1, 1, 1), matrix, origin))
    )
    assert_holds(source, array, (1e6, 1e6, 1e6))
    assert note in source.info.notes[0]


def test_the_affine_of_nifti_counts_where_it_is_not_that_of_its_pixdim(tmp_path):
    array = random_array("uint8")
    content = nifti_bytes(array, (2, 2, 3), np.diag([1.0, 1, 4]), (10, 0, 8))
    source = source_of(write_file(tmp_path / "a.nii", content))
    assert_holds(source, array, (4e6, 1e6, 1e6), (2, 0, 10))
    assert "its pixdim says 3e+06 × 2e+06 × 2e+06 nm" in source.info.notes[0]


def test_nifti_with_scaled_values_is_what_nibabel_says(tmp_path):
    import nibabel

    array = random_array("int16")
    path = write_file(tmp_path / "a.nii", nifti_bytes(array, (1, 1, 1), slope=0.37, intercept=-3.1))
    expected = nibabel.load(path).get_fdata(dtype=np.float32).T
    source = source_of(path)
    assert "stored int16 × 0.37" in source.info.notes[0]
    np.testing.assert_allclose(source.open()(source.info.bounds)[0], expected, rtol=1e-6, atol=1e-4)


def test_scaled_integers_of_many_digits_are_rounded_once(tmp_path):
    """Some keep uint32 as int32, with an intercept: neither is a float32, and their sums are."""
    array = random_array("uint16").astype(np.int64)
    stored = (array - 2**31).astype(np.int32)
    path = write_file(tmp_path / "a.nii", nifti_bytes(stored, (1, 1, 1), slope=1, intercept=2**31))
    assert_holds(source_of(path), array.astype(np.float32), (1e6, 1e6, 1e6))


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_nrrd(tmp_path, encoding, endian):
    array = random_array("uint64")
    lines = [
        'space units: "nm" "um" "nm"',
        "space: left-posterior-superior",
        "kinds: domain domain domain",
    ]
    lines += ["space directions: (4,0,0) (0,0.004,0) (0,0,40)", "space origin: (12,-0.02,0)"]
    content = nrrd_bytes(array, lines, encoding=encoding, endian=endian)
    assert_holds(
        source_of(write_file(tmp_path / "a.nrrd", content)), array, (40.0, 4.0, 4.0), (0, -5, 3)
    )


@pytest.mark.parametrize(
    ("kinds", "axes"),
    [("vector domain domain domain", "ZYXC"), ("space space space list", "CZYX")],
)
def test_nrrd_with_channels(tmp_path, kinds, axes):
    array = random_array("float32", (4, 5, 6, 3) if axes == "ZYXC" else (3, 4, 5, 6))
    none_first = axes == "ZYXC"
    spacings = "nan 4 4 40" if none_first else "4 4 40 nan"
    units = '"" "nm" "nm" "nm"' if none_first else '"nm" "nm" "nm" ""'
    content = nrrd_bytes(array, [f"kinds: {kinds}", f"spacings: {spacings}", f"units: {units}"])
    assert_holds(
        source_of(write_file(tmp_path / "a.nrrd", content)), as_czyx(array, axes), (40.0, 4.0, 4.0)
    )


@pytest.mark.parametrize(
    "lines",
    [
        ["space dimension: 3", "space directions: none (4,0,0) (0,4,0) (0,0,40)"],
        ["kinds: ??? domain domain domain", "spacings: nan 4 4 40"],
        ["spacings: nan 4 4 40"],
        ["kinds: ??? domain domain domain"],
        ["kinds: none domain domain domain"],
    ],
)
def test_an_axis_of_nrrd_that_leads_nowhere_is_that_of_channels(tmp_path, lines):
    array = random_array("uint8", (4, 5, 6, 3))
    source = source_of(write_file(tmp_path / "a.nrrd", nrrd_bytes(array, lines)))
    assert_holds(source, np.moveaxis(array, -1, 0))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["data file:=b.raw"], "states data file as a key of its own"),
        (["kinds:=list domain domain domain"], "states kinds as a key of its own"),
        (
            ["kinds: domain domain domain list", "spacings: nan 4 4 40"],
            "no direction in space for number 0",
        ),
    ],
)
def test_headers_of_nrrd_that_may_be_read_in_two_ways_are_refused(tmp_path, lines, message):
    write_file(tmp_path / "b.raw", bytes(360))
    array = random_array("uint8", (4, 5, 6, 3))
    with pytest.raises(VolumeError, match=message):
        source_of(write_file(tmp_path / "a.nrrd", nrrd_bytes(array, lines)))


def test_units_of_nrrd_are_those_of_the_axes_of_space(tmp_path):
    lines = ["space dimension: 3", 'space units: "nm" "um" "mm"']
    lines += ["space directions: (0,0,2) (0,3,0) (4,0,0)"]
    source = source_of(write_file(tmp_path / "a.nrrd", nrrd_bytes(random_array("uint8"), lines)))
    # x leads along the third axis of space, which is in millimetres
    assert source.info.voxel_size_nm == (4.0, 3000.0, 2e6)
    assert "turned" in " ".join(source.info.notes)


@pytest.mark.parametrize(
    "line", ["data file: LIST", "datafile: LIST 2", "data file: a%03d.raw 1 3 1"]
)
def test_nrrd_in_several_files_is_refused_by_name(tmp_path, line):
    content = nrrd_bytes(random_array("uint8"), [line])
    with pytest.raises(VolumeError, match="has its array in several files"):
        source_of(write_file(tmp_path / "a.nhdr", content))


def test_a_pair_of_nrrd_that_is_no_field_is_left_alone(tmp_path):
    array = random_array("uint8")
    content = nrrd_bytes(array, ["scanner:=FIB", "a note on my data file:=none"])
    assert_holds(source_of(write_file(tmp_path / "a.nrrd", content)), array)


def test_nrrd_with_its_data_beside_it(tmp_path):
    array = random_array("uint8")
    content = nrrd_bytes(array, ["data file: a.raw", "byte skip: -1", "spacings: 1 1 3"])
    header, _, data = content.partition(b"\n\n")
    (tmp_path / "a.raw").write_bytes(b"something before" + data)
    source = source_of(write_file(tmp_path / "a.nhdr", header + b"\n\n"))
    assert_holds(source, array)
    assert "says 3 × 1 × 1 (z, y, x), in no unit" in source.info.notes[0]


def test_angles_of_mrc_are_told(tmp_path):
    content = bytearray(mrc_bytes(random_array("int16"), (20, 20, 20)))
    struct.pack_into("<3f", content, 52, 90, 90, 120)
    source = source_of(write_file(tmp_path / "a.mrc", bytes(content)))
    assert "its axes meet at 90, 90, 120 degrees" in source.info.notes[0]


@pytest.mark.parametrize("name", ["a.mrc", "a.rec", "a.mrc.gz"])
@pytest.mark.parametrize("order", "<>")
def test_mrc(tmp_path, name, order):
    array = random_array("int16")
    content = mrc_bytes(array, (13.3, 13.3, 20), (3, -5, 2), order=order, extended=128)
    assert_holds(
        source_of(write_file(tmp_path / name, content)), array, (2.0, 1.33, 1.33), (2, -5, 3)
    )


@pytest.mark.parametrize(("imod", "dtype"), [(None, "int8"), (1, "int8"), (0, "uint8")])
def test_bytes_of_mrc_are_signed_unless_imod_says_otherwise(tmp_path, imod, dtype):
    array = random_array(dtype)
    assert_holds(
        source_of(write_file(tmp_path / "a.mrc", mrc_bytes(array, (0, 0, 0), imod=imod))), array
    )


def test_bytes_in_which_imod_has_packed_two_values_are_refused(tmp_path):
    content = mrc_bytes(random_array("int8"), (0, 0, 0), imod=16)
    with pytest.raises(VolumeError, match="two values of 4 bits in each byte"):
        source_of(write_file(tmp_path / "a.mrc", content))


@pytest.mark.parametrize(
    "array",
    [
        random_array(),
        np.asfortranarray(random_array("float32")),
        random_array(">i4", (2, 3, 4, 5)),
    ],
)
def test_npy(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    native = array.astype(array.dtype.newbyteorder("="))
    assert_holds(source_of(tmp_path / "a.npy"), native)
    np.savez_compressed(tmp_path / "a.npz", one=array, other=np.zeros(3))
    assert_holds(source_of(f"{tmp_path / 'a.npz'}:one"), native)
    assert_holds(source_of(tmp_path / "a.npz", "one"), native)
    with pytest.raises(VolumeError, match="holds one, other"):
        source_of(tmp_path / "a.npz")


def test_hdf5(tmp_path):
    array = random_array(">u2", (20, 30, 40))
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["volumes/raw"] = array
        file["volumes/raw"].attrs.update(resolution=[40, 4, 4], offset=[80, -4, 0])
        file.create_dataset(
            "chunked", data=array.transpose(2, 1, 0), chunks=(8, 8, 8), compression="gzip"
        )
        for dim, label in zip(file["chunked"].dims, "xyz", strict=True):
            dim.label = label
        file["chunked"].attrs["element_size_um"] = [0.04, 0.004, 0.004]
        file["list"] = np.zeros(3)
    native = array.astype("uint16")
    assert_holds(source_of(f"{path}:volumes/raw"), native, (40.0, 4.0, 4.0), (2, -1, 0))
    chunked = source_of(path, "/chunked")
    assert_holds(chunked, native, (40.0, 4.0, 4.0))
    assert chunked.info.grain == (8, 8, 8)
    with pytest.raises(VolumeError, match="holds the volumes chunked, volumes/raw"):
        source_of(path)
    for name in ("nothing", "volumes"):
        with pytest.raises(VolumeError, match=f"no dataset {name}"):
            source_of(path, name)
    with pytest.raises(VolumeError, match="has the axes"):
        source_of(path, "list")


def test_two_voxel_sizes_of_hdf5_that_disagree_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["v"] = random_array("uint8")
        file["v"].attrs.update(resolution=[40, 4, 4], element_size_um=[0.04, 0.004, 0.004])
    assert source_of(path).info.voxel_size_nm == (40.0, 4.0, 4.0)
    with h5py.File(path, "a") as file:
        file["v"].attrs["element_size_um"] = [0.03, 0.004, 0.004]
    with pytest.raises(VolumeError, match="states two voxel sizes"):
        source_of(path)


@pytest.mark.parametrize("value", [[0.04, -0.004, 0.004], "0.04 0.004 0.004", [0.04, 0.004]])
def test_a_voxel_size_of_hdf5_that_is_none_is_told(value, tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["v"] = random_array("uint8")
        file["v"].attrs["element_size_um"] = value
    info = source_of(path).info
    assert info.voxel_size_nm is None
    assert ["element_size_um is no voxel size" in note for note in info.notes] == [True]


def write_ilastik(path, array, axes, **keys):
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("exported_data", data=array, **keys)
        tags = [{"key": axis, "typeFlags": 2, "resolution": 0} for axis in axes]
        dataset.attrs["axistags"] = json.dumps({"axes": tags})


@pytest.mark.parametrize("axes", ["zyxc", "xyz", "czyx"])
def test_axes_of_hdf5_as_ilastik_states_them(tmp_path, axes):
    array = random_array("uint8", (3, 4, 5, 6)[: len(axes)])
    write_ilastik(tmp_path / "a.h5", array, axes)
    assert_holds(source_of(tmp_path / "a.h5"), as_czyx(array, axes.upper()))


def test_axistags_of_hdf5_in_an_array_and_beside_labels_of_some_axes(tmp_path):
    array = random_array("uint8", (3, 4, 5))
    write_ilastik(tmp_path / "a.h5", array, "xyz")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        dataset = file["exported_data"]
        text = dataset.attrs["axistags"]
        dataset.attrs["axistags"] = np.array([text], h5py.string_dtype())
        dataset.dims[0].label = "x"
    assert_holds(source_of(tmp_path / "a.h5"), as_czyx(array, "XYZ"))


@pytest.mark.parametrize(
    "tags",
    ['{"axes": [{"key": "x"', '{"axes": [{"key": "x"}, {"key": "y"}]}', 5, ["a", "b"], "[]"],
)
def test_axistags_of_hdf5_that_cannot_be_used_are_refused(tags, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = random_array("uint8", (3, 4, 5))
        file["v"].attrs["axistags"] = tags
    with pytest.raises(
        VolumeError, match="has axistags that cannot be read, or that are not of its 3"
    ):
        source_of(tmp_path / "a.h5")


def test_labels_of_some_axes_of_hdf5_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = random_array("uint8", (3, 4, 5))
        file["v"].dims[0].label = "x"
    with pytest.raises(VolumeError, match="has DIMENSION_LABELS that cannot be read, or that are"):
        source_of(tmp_path / "a.h5")


def write_scales(path, array, names):
    """A dataset whose axes have names as those of netCDF have them."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("v", data=array)
        for axis, name in enumerate(names):
            file[name] = np.arange(array.shape[axis])
            file[name].make_scale("This is a netCDF dimension but not a netCDF variable.")
            dataset.dims[axis].attach_scale(file[name])


@pytest.mark.parametrize("names", ["xyz", "zyx", "czyx", "xyzc"])
def test_axes_of_hdf5_by_scales_of_its_dimensions(names, tmp_path):
    array = random_array("uint8", (3, 4, 5, 6)[: len(names)])
    write_scales(tmp_path / "a.h5", array, names)
    assert_holds(source_of(f"{tmp_path}/a.h5:v"), as_czyx(array, names.upper()))


def test_scales_of_hdf5_that_name_no_axes(tmp_path):
    array = random_array("uint8", (3, 4, 5))
    write_scales(tmp_path / "a.h5", array, ["phony_dim_0", "phony_dim_1", "phony_dim_2"])
    assert_holds(source_of(f"{tmp_path}/a.h5:v"), array)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["phony_dim_1"]
    assert_holds(source_of(f"{tmp_path}/a.h5:v"), array)
    write_scales(tmp_path / "b.h5", array, ["tomo_z", "cell_y", "x"])
    assert_holds(source_of(f"{tmp_path}/b.h5:v"), array)
    write_scales(tmp_path / "c.h5", array, ["x_nm", "Y", "z position"])
    assert_holds(source_of(f"{tmp_path}/c.h5:v"), array.T)


@pytest.mark.parametrize("names", [[], ["scale_factor"], ["scale_factor", "add_offset"]])
def test_scaling_of_netcdf_is_not_applied_and_told(names, tmp_path):
    array = random_array("int16", (3, 4, 5))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = array
        for name in names:
            file["v"].attrs[name] = 0.5
    source = source_of(tmp_path / "a.h5")
    assert_holds(source, array)
    told = [note for note in source.info.notes if "are not applied" in note]
    assert len(told) == bool(names)
    assert all(name in note for name in names for note in told)


def test_axes_of_hdf5_in_two_ways_are_refused(tmp_path):
    write_ilastik(tmp_path / "a.h5", random_array("uint8", (3, 4, 5)), "xyz")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        for axis, label in enumerate("zyx"):
            file["exported_data"].dims[axis].label = label
    with pytest.raises(VolumeError, match="axes ZYX by its DIMENSION_LABELS and XYZ by its axist"):
        source_of(tmp_path / "a.h5")


@pytest.mark.parametrize("chunks", [None, True])
@pytest.mark.parametrize("axes", ["tzyxc", "ctzyx", "tzyx", "zyxt"])
def test_one_time_of_hdf5_is_a_volume(tmp_path, axes, chunks):
    extents = {"t": 1, "z": 4, "y": 5, "x": 6, "c": 2}
    array = random_array("uint8", [extents[axis] for axis in axes])
    write_ilastik(tmp_path / "a.h5", array, axes, chunks=chunks)
    volume = array.reshape([extents[axis] for axis in axes if axis != "t"])
    assert_holds(source_of(tmp_path / "a.h5"), as_czyx(volume, axes.replace("t", "").upper()))


@pytest.mark.parametrize("shape", [(1, 4, 5, 6, 1), (1, 1, 4, 5, 6)])
def test_five_axes_of_hdf5_without_labels(tmp_path, shape):
    """As ilastik's plugin for ImageJ writes them."""
    array = random_array("uint8", shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = array
    assert_holds(source_of(tmp_path / "a.h5"), array.reshape(4, 5, 6))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = random_array("uint8", (1, 4, 5, 6, 2))
    with pytest.raises(VolumeError, match="has the axes CZYX of "):
        source_of(tmp_path / "a.h5")


def test_several_times_of_hdf5_are_refused(tmp_path):
    write_ilastik(tmp_path / "a.h5", random_array("uint8", (2, 3, 4, 5, 1)), "tzyxc")
    with pytest.raises(VolumeError, match="has 2 times: convert reads one"):
        source_of(f"{tmp_path}/a.h5:exported_data")


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_chunk_of_hdf5_that_holds_too_little_is_damaged(tmp_path, compression, checksum):
    """HDF5 would read on in memory behind it."""
    array = random_array("uint16", (8, 8, 8))
    half = array[:2, :4, :4].tobytes()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        keys = {"compression": compression, "shuffle": True, "fletcher32": checksum}
        dataset = file.create_dataset("v", data=array, chunks=(4, 4, 4), **keys)
        file.create_dataset("sound/v/w/x/y", data=array[0])
        if not checksum:
            packed = half if compression is None else zlib.compress(half)
            dataset.id.write_direct_chunk((4, 4, 4), packed)
    source = source_of(tmp_path / "a.h5")
    if checksum:
        assert_holds(source, array)
        return
    with pytest.raises(PermanentReadError, match=r"\(4, 4, 4\) holds 64 bytes, expected 128"):
        source.open()(source.info.bounds)


@pytest.mark.parametrize("name", ["a.npy", "a.nii", "a.mrc", "a.nrrd"])
def test_a_file_that_was_cut_off(tmp_path, name):
    array = random_array("int16")
    np.save(tmp_path / "a.npy", array)
    content = {
        "a.npy": (tmp_path / "a.npy").read_bytes(),
        "a.nii": nifti_bytes(array, (1, 1, 1)),
        "a.mrc": mrc_bytes(array, (1, 1, 1)),
        "a.nrrd": nrrd_bytes(array, []),
    }[name]
    with pytest.raises(VolumeError, match="was cut off"):
        source_of(write_file(tmp_path / name, content[:-10]))
    for length in (0, 7):
        with pytest.raises(VolumeError, match="is not an? "):
            source_of(write_file(tmp_path / name, content[:length]))


def test_a_compressed_file_that_was_cut_off(tmp_path):
    path = write_file(
        tmp_path / "a.nii.gz", nifti_bytes(random_array("int16", (30, 30, 30)), (1, 1, 1))
    )
    whole = (tmp_path / "a.nii.gz").read_bytes()
    (tmp_path / "a.nii.gz").write_bytes(whole[:-1000])
    source = source_of(path)
    with pytest.raises(PermanentReadError, match="cannot unpack"):
        source.open()


def test_values_that_are_no_numbers_are_refused(tmp_path):
    np.save(tmp_path / "b.npy", np.zeros((2, 2, 2), bool))
    np.save(tmp_path / "c.npy", np.zeros((2, 2, 2), complex))
    np.save(tmp_path / "d.npy", np.zeros((2, 2)))
    np.save(tmp_path / "o.npy", np.array([[["a", None]]], object), allow_pickle=True)
    for name, text in (("b", "bool"), ("c", "complex128"), ("o", "object")):
        with pytest.raises(VolumeError, match=text):
            source_of(tmp_path / f"{name}.npy")
    assert_holds(source_of(tmp_path / "d.npy"), np.zeros((1, 2, 2)))


def test_what_is_no_source(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(VolumeError, match="of no known kind"):
        source_of(tmp_path / "a.txt")
    with pytest.raises(VolumeError, match="there is nothing at"):
        source_of(tmp_path / "b.tif")
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2)))
    with pytest.raises(ConfigError, match="has no datasets"):
        source_of(tmp_path / "a.npy", "x")
    with pytest.raises(ConfigError, match="has no scales"):
        source_of(tmp_path / "a.npy", scale=1)


def test_an_image_of_a_tiff_by_its_number_behind_the_file(tmp_path):
    images = [random_array("uint8", (2, 3, 4)), random_array("uint8", (2, 5, 6))]
    with tifffile.TiffWriter(tmp_path / "a.tif", ome=True) as file:
        for image in images:
            file.write(image, photometric="minisblack", metadata={"axes": "ZYX"})
    assert_holds(source_of(f"{tmp_path}/a.tif:1"), images[1])


def test_a_stack_of_slices_has_no_datasets(tmp_path):
    tifffile.imwrite(tmp_path / "s1.tif", random_array("uint8", (3, 4)))
    with pytest.raises(ConfigError, match="has no datasets"):
        source_of(f"{tmp_path}/s*.tif:1")


def test_real_volumes(shared_data):
    import nibabel

    mri = shared_data / "mri_meshnet" / "t1_crop.nii.gz"
    expected = np.asanyarray(nibabel.load(mri).dataobj).T
    assert_holds(source_of(mri), np.ascontiguousarray(expected), (1e6, 1e6, 1e6))
    with h5py.File(shared_data / "seunglab_synapse" / "sample1_input.h5") as file:
        assert_holds(
            source_of(shared_data / "seunglab_synapse" / "sample1_input.h5"), file["main"][:]
        )
