"""Volumes that go from other libraries to this package and back: what survives, as a table.

    PYTHONPATH=tests python -m round_trips

prints the table that is in ``docs/convert.md``; a test compares both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import tensorstore as ts
from instrument_files import (
    LIBCZI,
    libczi_voxels,
    lif_bytes,
    nd2_bytes,
    write_dicom,
    write_ims,
    write_svs,
)

from beam_inference.conversion.convert import convert
from beam_inference.conversion.find_source import find_source
from beam_inference.volumes.kvstores import LOCAL

SHAPE = (9, 20, 31)
SIZE = (40.0, 4.0, 8.0)
START = (3, 5, 7)
ORIGIN = tuple(n * size for n, size in zip(START, SIZE, strict=True))
NONE = "–"


@dataclass(frozen=True)
class Found:
    """What a library finds in a file: None where the format, or the library, says nothing.

    Attributes:
        array: voxels, (channels, z, y, x).
        size: the voxel size in nm, ZYX.
        start: the first voxel, ZYX.
        axes: names of the axes, as they are stored.
    """

    array: np.ndarray
    size: tuple[float, ...] | None = None
    start: tuple[int, ...] | None = None
    axes: str | None = None


@dataclass(frozen=True)
class Format:
    """A format: what writes it for us, and what reads what we write.

    Attributes:
        name: its name in the table.
        writer: the library that writes, or "by hand": after what is published of the format.
        write: writes the array into a folder; what is read of it, and what it is.
        reader: the library that reads what we write; None where we write none.
        target: the name of what we write.
        read: reads that.
        axes: the names of the axes that it is to have.
        options: what convert needs to be told.
    """

    name: str
    writer: str
    write: Callable[[Path], tuple[str, Found]]
    reader: str | None = None
    target: str = ""
    read: Callable[[str], Found] | None = None
    axes: str | None = None
    options: tuple[tuple[str, object], ...] = ()


def make_array() -> np.ndarray:
    """Voxels of which no two axes can be mistaken for each other."""
    return np.random.default_rng(0).integers(0, 60000, SHAPE, np.uint16)


ARRAY = make_array()
WHOLE = Found(ARRAY[None], SIZE, START)


def _precomputed(folder: Path) -> tuple[str, Found]:
    from cloudvolume import CloudVolume

    volume = CloudVolume.from_numpy(
        np.asfortranarray(ARRAY.T),
        f"file://{folder}/em",
        resolution=SIZE[::-1],
        voxel_offset=START[::-1],
        chunk_size=(16, 16, 8),
        progress=False,
    )
    return f"{folder}/em", Found(volume[...].T[:, ...], SIZE, START)


def _read_precomputed(path: str) -> Found:
    from cloudvolume import CloudVolume

    volume = CloudVolume(f"file://{path}", progress=False)
    start = tuple(int(n) for n in volume.voxel_offset[::-1])
    return Found(np.asarray(volume[...]).T, tuple(map(float, volume.resolution[::-1])), start)


def _group_attributes() -> dict[str, object]:
    axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    steps = [{"type": "scale", "scale": list(SIZE)}, {"type": "translation", "translation": ORIGIN}]
    datasets = [{"path": "0", "coordinateTransformations": steps}]
    return {"multiscales": [{"axes": axes, "datasets": datasets, "name": "em"}]}


def _ome_zarr(version: int) -> Callable[[Path], tuple[str, Found]]:
    def write(folder: Path) -> tuple[str, Found]:
        import zarr

        group = zarr.open_group(f"{folder}/em", mode="w", zarr_format=version)
        group.create_array("0", data=ARRAY, chunks=(8, 16, 16))
        attributes = _group_attributes()
        if version == 3:
            attributes = {"ome": {"version": "0.5", **attributes}}
        else:
            attributes["multiscales"][0]["version"] = "0.4"  # type: ignore[index]
        group.attrs.update(attributes)
        return f"{folder}/em", Found(ARRAY[None], SIZE, START)

    return write


def _read_ome_zarr(path: str) -> Found:
    import zarr

    group = zarr.open_group(path, mode="r")
    attributes = dict(group.attrs)
    (image,) = attributes.get("ome", attributes)["multiscales"]
    (dataset,) = image["datasets"]
    steps = {step["type"]: step[step["type"]] for step in dataset["coordinateTransformations"]}
    start = tuple(round(a / b) for a, b in zip(steps["translation"], steps["scale"], strict=True))
    axes = "".join(axis["name"] for axis in image["axes"])
    return Found(group[dataset["path"]][...][None], tuple(map(float, steps["scale"])), start, axes)


def _zarr(version: int) -> Callable[[Path], tuple[str, Found]]:
    def write(folder: Path) -> tuple[str, Found]:
        import zarr

        array = zarr.create_array(
            f"{folder}/em", data=ARRAY, chunks=(8, 16, 16), zarr_format=version
        )
        array.attrs["dimension_units"] = [f"{size:g} nm" for size in SIZE]
        return f"{folder}/em", Found(ARRAY[None], SIZE)

    return write


def _read_zarr(path: str) -> Found:
    import zarr

    array = zarr.open_array(path, mode="r")
    names = array.metadata.dimension_names if array.metadata.zarr_format == 3 else None
    axes = "".join(names or array.attrs["_ARRAY_DIMENSIONS"])
    sizes = tuple(float(unit.removesuffix(" nm")) for unit in array.attrs["dimension_units"])
    return Found(array[...][None], sizes, None, axes)


def _n5(folder: Path) -> tuple[str, Found]:
    metadata = {
        "dimensions": SHAPE[::-1],
        "blockSize": [16, 16, 8],
        "dataType": "uint16",
        "compression": {"type": "gzip"},
        "axes": ["x", "y", "z"],
        "units": ["nm"] * 3,
        "resolution": SIZE[::-1],
    }
    spec = {"driver": "n5", "kvstore": f"file://{folder}/em/", "metadata": metadata}
    ts.open(spec, create=True).result().write(ARRAY.T).result()
    return f"{folder}/em", Found(ARRAY[None], SIZE)


def _read_n5(path: str) -> Found:
    attributes = json.loads((Path(path) / "attributes.json").read_text())
    store = ts.open({"driver": "n5", "kvstore": f"file://{path}/"}).result()
    axes = "".join(attributes["axes"])
    return Found(store.read().result().T[None], tuple(attributes["resolution"][::-1]), None, axes)


def _tiff(folder: Path) -> tuple[str, Found]:
    import tifffile

    metadata = {"axes": "ZYX"}
    for axis, size in zip("ZYX", SIZE, strict=True):
        metadata |= {f"PhysicalSize{axis}": size / 1000, f"PhysicalSize{axis}Unit": "µm"}
    tifffile.imwrite(folder / "em.ome.tif", ARRAY, metadata=metadata)
    return f"{folder}/em.ome.tif", Found(ARRAY[None], SIZE)


def _read_tiff(path: str) -> Found:
    import tifffile

    with tifffile.TiffFile(path) as tiff:
        pixels = tifffile.xml2dict(tiff.ome_metadata)["OME"]["Image"]["Pixels"]
        size = tuple(float(pixels[f"PhysicalSize{axis}"]) for axis in "ZYX")
        return Found(tiff.asarray()[None], size, None, tiff.series[0].axes)


def _imagej(folder: Path) -> tuple[str, Found]:
    import tifffile

    tifffile.imwrite(
        folder / "em.tif",
        ARRAY,
        imagej=True,
        resolution=(1 / SIZE[2], 1 / SIZE[1]),
        metadata={"spacing": SIZE[0], "unit": "nm", "axes": "ZYX"},
    )
    return f"{folder}/em.tif", Found(ARRAY[None], SIZE)


def _hdf5(folder: Path) -> tuple[str, Found]:
    with h5py.File(folder / "em.h5", "w") as file:
        made = file.create_dataset("volumes/raw", data=ARRAY, chunks=(4, 8, 8))
        made.attrs["resolution"] = SIZE
        made.attrs["offset"] = ORIGIN
        file["volumes/other"] = ARRAY[::2]
    return f"{folder}/em.h5:volumes/raw", Found(ARRAY[None], SIZE, START)


def _read_hdf5(path: str) -> Found:
    with h5py.File(path) as file:
        made = file["main"]
        size = tuple(made.attrs["resolution"])
        start = tuple(round(a / b) for a, b in zip(made.attrs["offset"], size, strict=True))
        return Found(made[:][None], size, start, "".join(dim.label for dim in made.dims))


def _nifti(folder: Path) -> tuple[str, Found]:
    import nibabel

    affine = np.diag([*(size * 1e-3 for size in SIZE[::-1]), 1])
    affine[:3, 3] = [n * 1e-3 for n in ORIGIN[::-1]]
    image = nibabel.Nifti1Image(ARRAY.T, affine)
    image.header.set_xyzt_units("micron")
    nibabel.save(image, folder / "em.nii.gz")
    return f"{folder}/em.nii.gz", Found(ARRAY[None], SIZE, START)


def _read_nifti(path: str) -> Found:
    import nibabel

    image = nibabel.load(path)
    nm = {"micron": 1e3, "mm": 1e6}[image.header.get_xyzt_units()[0]]
    size = tuple(float(f"{zoom * nm:.6g}") for zoom in image.header.get_zooms()[2::-1])
    origin = image.affine[:3, 3][::-1] * nm
    start = tuple(round(a / b) for a, b in zip(origin, size, strict=True))
    return Found(np.asanyarray(image.dataobj).T[None], size, start)


def _nrrd(folder: Path) -> tuple[str, Found]:
    import nrrd

    header = {
        "space dimension": 3,
        "space units": ["nm", "nm", "nm"],
        "space directions": np.diag(SIZE[::-1]),
        "space origin": ORIGIN[::-1],
    }
    nrrd.write(str(folder / "em.nrrd"), ARRAY, header, index_order="C")
    return f"{folder}/em.nrrd", Found(ARRAY[None], SIZE, START)


def _read_nrrd(path: str) -> Found:
    import nrrd

    array, header = nrrd.read(path, index_order="C")
    nm = {"nm": 1.0, "um": 1e3, "mm": 1e6}[header["space units"][0]]
    size = tuple(float(f"{n * nm:.9g}") for n in np.diag(header["space directions"])[::-1])
    start = tuple(
        round(a * nm / b) for a, b in zip(header["space origin"][::-1], size, strict=True)
    )
    return Found(array[None], size, start)


def _mrc(folder: Path) -> tuple[str, Found]:
    import mrcfile

    with mrcfile.new(folder / "em.mrc") as mrc:
        mrc.set_data(ARRAY)
        mrc.voxel_size = tuple(10 * size for size in SIZE[::-1])
        mrc.nstart = START[::-1]
    return f"{folder}/em.mrc", Found(ARRAY[None], SIZE, START)


def _read_mrc(path: str) -> Found:
    import mrcfile

    with mrcfile.open(path) as mrc:
        size = tuple(float(f"{mrc.voxel_size[axis] / 10:.6g}") for axis in "zyx")
        return Found(mrc.data[None].copy(), size, tuple(int(mrc.nstart[axis]) for axis in "zyx"))


def _npy(folder: Path) -> tuple[str, Found]:
    np.save(folder / "em.npy", ARRAY)
    return f"{folder}/em.npy", Found(ARRAY[None])


def _read_npy(path: str) -> Found:
    return Found(np.load(path)[None])


def _png(folder: Path) -> tuple[str, Found]:
    from PIL import Image

    (folder / "slices").mkdir()
    for z, plane in enumerate(ARRAY):
        Image.fromarray(plane).save(folder / "slices" / f"s{z}.png")
    return f"{folder}/slices", Found(ARRAY[None])


def _read_png(path: str) -> Found:
    from PIL import Image

    return Found(np.stack([np.asarray(Image.open(p)) for p in sorted(Path(path).iterdir())])[None])


def _czi(folder: Path) -> tuple[str, Found]:
    return str(LIBCZI), Found(libczi_voxels(), (300.0, 100.0, 100.0))


def _lif(folder: Path) -> tuple[str, Found]:
    (folder / "em.lif").write_bytes(lif_bytes({"em": ARRAY[None, None]}, SIZE))
    return f"{folder}/em.lif", Found(ARRAY[None], SIZE)


def _nd2(folder: Path) -> tuple[str, Found]:
    size_um = (0.04, 0.008, 0.008)
    (folder / "em.nd2").write_bytes(nd2_bytes(ARRAY[None, :, None], size_um))
    return f"{folder}/em.nd2", Found(ARRAY[None], (40.0, 8.0, 8.0))


def _ims(folder: Path) -> tuple[str, Found]:
    write_ims(folder / "em.ims", ARRAY[None, None], [size / 1000 for size in SIZE])
    return f"{folder}/em.ims", Found(ARRAY[None], SIZE)


def _dicom(folder: Path) -> tuple[str, Found]:
    size_mm = [size * 1e-3 for size in SIZE]  # as if nanometres were micrometres
    origin = [n * size for n, size in zip(START, size_mm, strict=True)]
    write_dicom(folder / "ct", ARRAY, size_mm, origin)
    return f"{folder}/ct", Found(ARRAY[None], tuple(size * 1e3 for size in SIZE), START)


def _svs(folder: Path) -> tuple[str, Found]:
    import tifffile

    y, x = np.mgrid[0:300, 0:500]
    slide = np.stack([y % 256, x % 256, (x + y) // 4], axis=-1).astype(np.uint8)
    path = write_svs(folder / "em.svs", slide)
    whole = tifffile.imread(path)
    return str(path), Found(np.moveaxis(whole, -1, 0)[:, None])


FORMATS = (
    Format("precomputed", "cloud-volume", _precomputed, "cloud-volume", "em", _read_precomputed),
    Format(
        "OME-Zarr 0.5", "zarr-python", _ome_zarr(3), "zarr-python", "em", _read_ome_zarr, "zyx",
        (("format", "ome_zarr"),),
    ),
    Format(
        "OME-Zarr 0.4", "zarr-python", _ome_zarr(2), "zarr-python", "em", _read_ome_zarr, "zyx",
        (("format", "ome_zarr_0.4"),),
    ),
    Format(
        "zarr v3", "zarr-python", _zarr(3), "zarr-python", "em", _read_zarr, "zyx",
        (("format", "zarr3"), ("offset", (0, 0, 0))),
    ),
    Format(
        "zarr v2", "zarr-python", _zarr(2), "zarr-python", "em", _read_zarr, "zyx",
        (("format", "zarr2"), ("offset", (0, 0, 0))),
    ),
    Format(
        "N5", "tensorstore", _n5, "tensorstore", "em", _read_n5, "xyz",
        (("format", "n5"), ("offset", (0, 0, 0))),
    ),
    Format(
        "OME-TIFF", "tifffile", _tiff, "tifffile", "em.tif", _read_tiff, "ZYX",
        (("drop", ("offset",)),),
    ),
    Format("TIFF of ImageJ", "tifffile", _imagej),
    Format("HDF5", "h5py", _hdf5, "h5py", "em.h5", _read_hdf5, "zyx"),
    Format("NIfTI", "nibabel", _nifti, "nibabel", "em.nii.gz", _read_nifti),
    Format("NRRD", "pynrrd", _nrrd, "pynrrd", "em.nrrd", _read_nrrd),
    Format("MRC", "mrcfile", _mrc, "mrcfile", "em.mrc", _read_mrc),
    Format(
        "NumPy", "numpy", _npy, "numpy", "em.npy", _read_npy, None,
        (("drop", ("offset", "voxel-size")),),
    ),
    Format(
        "PNG slices", "pillow", _png, "pillow", "em", _read_png, None,
        (("format", "png"), ("drop", ("offset", "voxel-size"))),
    ),
    Format("CZI", "libCZI, Zeiss's own", _czi),
    Format("LIF", "by hand", _lif),
    Format("ND2", "by hand", _nd2),
    Format("IMS", "by hand, with h5py", _ims),
    Format("DICOM", "pydicom", _dicom),
    Format("whole slide (SVS)", "tifffile", _svs),
)  # fmt: skip


def check_reading(format: Format, folder: Path) -> list[str]:
    """Read what the library wrote; the table's words on voxels, voxel size, offset and axes.

    Raises:
        AssertionError: something is not as it was written.
    """
    path, expected = format.write(folder)
    source = find_source(path, None, 0, LOCAL)
    array = source.open()(source.info.bounds)
    whole = expected.array if expected.array.ndim == 4 else expected.array[None]
    assert array.dtype == whole.dtype, format.name
    assert np.array_equal(array, whole), format.name
    assert source.info.voxel_size_nm == expected.size, (format.name, source.info.voxel_size_nm)
    assert source.info.bounds.start == (expected.start or (0, 0, 0)), format.name
    return ["equal", "equal" if expected.size else NONE, "equal" if expected.start else NONE]


def check_writing(format: Format, folder: Path) -> list[str]:
    """Write, and let the library read; as :func:`check_reading`, and words on axes."""
    if format.read is None:
        return [NONE] * 4
    source, _ = _hdf5(folder)
    target = folder / "written" / format.target
    target.parent.mkdir()
    convert(source, str(target), **dict(format.options))  # type: ignore[arg-type]
    found = format.read(str(target))
    assert np.array_equal(found.array.reshape(WHOLE.array.shape), WHOLE.array), format.name
    assert found.size in (None, SIZE), (format.name, found.size)
    assert found.start in (None, START), (format.name, found.start)
    assert found.axes == format.axes, (format.name, found.axes)
    words = ["equal" if value else NONE for value in (found.array.size, found.size, found.start)]
    return [*words, found.axes or NONE]


def make_table() -> str:
    """The table of all formats, in Markdown."""
    lines = [
        "| format | written by | voxels | voxel size | offset | we write, read by | voxels "
        "| voxel size | offset | axes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for format in FORMATS:
        with tempfile.TemporaryDirectory() as name:
            read = Path(name) / "read"
            write = Path(name) / "write"
            read.mkdir()
            write.mkdir()
            cells = [format.name, format.writer, *check_reading(format, read)]
            cells += [format.reader or NONE, *check_writing(format, write)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_table())
