"""Test TIFF files whose pages are laid out, or described, otherwise than the first one."""

import numpy as np
import pytest
import tifffile

from beam_inference.conversion.tiff import tiff_source

IMAGE = np.arange(3 * 40 * 50, dtype="u2").reshape(3, 40, 50)


def write_strips(path, kind):
    """Pages of two strips each, which follow one another."""
    if kind == "ome":
        options = {"ome": True, "metadata": {"axes": "ZYX"}, "rowsperstrip": 20}
        tifffile.imwrite(path, IMAGE, photometric="minisblack", **options)
        return
    with tifffile.TiffWriter(path) as file:
        for page in IMAGE:
            file.write(
                page, photometric="minisblack", rowsperstrip=20, metadata=None, contiguous=False
            )


def exchange_strips(path, number):
    """Exchange the places of the strips of a page, which stays the same image."""
    content = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as tiff:
        first, second = tiff.pages[number].aspage().dataoffsets
        size = tiff.pages[number].aspage().databytecounts[0]
    for start, voxels in ((first, IMAGE[number, 20:]), (second, IMAGE[number, :20])):
        content[start : start + size] = voxels.tobytes()
    path.write_bytes(content)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        tiff.pages[number].aspage().tags["StripOffsets"].overwrite((second, first))


@pytest.mark.parametrize("kind", ["ome", "plain"])
@pytest.mark.parametrize("number", [None, 0, 1, 2])
def test_strips_in_another_order(tmp_path, kind, number):
    path = tmp_path / "a.tif"
    write_strips(path, kind)
    if number is not None:
        exchange_strips(path, number)
    source = tiff_source(str(path), None)
    np.testing.assert_array_equal(source.open()(source.info.bounds)[0], IMAGE)


def write_images(path, sizes):
    """An OME-TIFF with images of these sizes of voxels along x, in nm."""
    with tifffile.TiffWriter(path, ome=True) as file:
        for size in sizes:
            placed = {f"PhysicalSize{axis}": size for axis in "XYZ"}
            units = {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
            metadata = {"axes": "ZYX", **placed, **units}
            file.write(IMAGE, photometric="minisblack", metadata=metadata)


def test_each_image_of_an_ome_tiff_has_its_own_voxel_size(tmp_path):
    write_images(tmp_path / "a.tif", [4, 8])
    sizes = [tiff_source(str(tmp_path / "a.tif"), n).info.voxel_size_nm for n in ("0", "1")]
    assert sizes == [(4, 4, 4), (8, 8, 8)]


def test_voxel_sizes_of_which_nobody_knows_whose_they_are_are_none(tmp_path):
    """One image more is described than is there."""
    path = tmp_path / "a.tif"
    write_images(path, [4])
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        text = tiff.ome_metadata
        begin = text.index("<Image")
        image = text[begin : text.index("</Image>") + len("</Image>")]
        other = image.replace('="4"', '="8"').replace('ID="Image:0"', 'ID="Image:1"')
        other = other[: other.index("<TiffData")] + "</Pixels></Image>"
        assert '="8"' in other
        tiff.pages[0].tags["ImageDescription"].overwrite(text.replace(image, image + other))
    with tifffile.TiffFile(path) as tiff:
        assert len(tiff.series) == 1
    assert tiff_source(str(path), None).info.voxel_size_nm is None
