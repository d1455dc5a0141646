"""Test TIFF files whose pages are laid out, or described, otherwise than the first one."""

import re
import struct

import numpy as np
import pytest
import tifffile

from beam_inference.conversion.tiff import tiff_source
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox

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


def test_pages_that_another_file_describes_are_refused(tmp_path):
    path = tmp_path / "a.ome.tif"
    text = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
    text += '<BinaryOnly MetadataFile="c.companion.ome" UUID="urn:uuid:1"/></OME>'
    tifffile.imwrite(path, IMAGE, photometric="minisblack", description=text, metadata=None)
    with pytest.raises(VolumeError, match=r"what its pages are, stands in c\.companion\.ome"):
        tiff_source(str(path), None)


@pytest.mark.parametrize("kind", ["ome", "plain"])
@pytest.mark.parametrize("number", [None, 0, 1, 2])
def test_strips_in_another_order(tmp_path, kind, number):
    path = tmp_path / "a.tif"
    write_strips(path, kind)
    if number is not None:
        exchange_strips(path, number)
    source = tiff_source(str(path), None)
    np.testing.assert_array_equal(source.open()(source.info.bounds)[0], IMAGE)


def write_images(path, sizes, unit="nm"):
    """An OME-TIFF with images of these sizes of voxels."""
    with tifffile.TiffWriter(path, ome=True) as file:
        for size in sizes:
            placed = {f"PhysicalSize{axis}": size for axis in "XYZ"}
            units = {f"PhysicalSize{axis}Unit": unit for axis in "XYZ"}
            metadata = {"axes": "ZYX", **placed, **units}
            file.write(IMAGE, photometric="minisblack", metadata=metadata)


@pytest.mark.parametrize(
    ("unit", "nm"), [("µm", 1e3), ("cm", 1e7), ("dm", 1e8), ("in", 2.54e7), ("thou", 2.54e4)]
)
def test_units_of_an_ome_tiff(tmp_path, unit, nm):
    write_images(tmp_path / "a.tif", [2], unit)
    size = tiff_source(str(tmp_path / "a.tif"), None).info.voxel_size_nm
    assert size == pytest.approx((2 * nm,) * 3)


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


@pytest.mark.parametrize(
    "instead", ["", "<MetadataOnly/>", '<BinData BigEndian="false" Length="0"/>']
)
def test_ome_metadata_that_do_not_say_what_pages_are(tmp_path, instead):
    """The planes of two channels would be read as z."""
    path = tmp_path / "a.ome.tif"
    array = np.zeros((4, 2, 40, 50), np.uint16)
    tifffile.imwrite(path, array, ome=True, metadata={"axes": "ZCYX"}, photometric="minisblack")
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        text = re.sub("<TiffData.*?(/>|</TiffData>)", "", tiff.ome_metadata, flags=re.DOTALL)
        text = text.replace("</Pixels>", f"{instead}</Pixels>")
        tiff.pages[0].tags["ImageDescription"].overwrite(text)
    with pytest.raises(VolumeError, match="do not say which of its 8 pages are of which z"):
        tiff_source(str(path), None)


@pytest.mark.parametrize("kind", [{"imagej": True}, {"ome": True}])
def test_times_are_read_along_z_with_a_note(tmp_path, kind):
    voxels = np.arange(5 * 6 * 7, dtype=np.uint16).reshape(5, 6, 7)
    for axes, notes in (("TYX", ("its 5 times (axis T) are read along z",)), ("ZYX", ())):
        tifffile.imwrite(tmp_path / "a.tif", voxels, metadata={"axes": axes}, **kind)
        source = tiff_source(str(tmp_path / "a.tif"), None)
        np.testing.assert_array_equal(source.open()(source.info.bounds)[0], voxels)
        told = [note for note in source.info.notes if "times" in note]
        assert [note.partition(":")[0] for note in told] == list(notes)


def test_a_slide_of_one_scale_is_chosen_among_its_pictures(tmp_path):
    slide = np.random.default_rng(0).integers(0, 256, (512, 768, 3), np.uint8)
    program = "Aperio Image Library v11.2.1\r\n"
    size = "768x512 [0,0 768x512] (240x240) JPEG/RGB Q=70"
    with tifffile.TiffWriter(tmp_path / "a.svs") as tiff:
        keys = {"photometric": "rgb", "metadata": None}
        tiff.write(slide, tile=(240, 240), description=f"{program}{size}|MPP = 0.499", **keys)
        thumbnail = f"{program}{size} -> 192x128 - |MPP = 0.499"
        tiff.write(slide[::4, ::4].copy(), description=thumbnail, **keys)
        label = f"{program}label 387x463"
        tiff.write(slide[:400, :387].copy(), subfiletype=1, description=label, **keys)
    source = tiff_source(str(tmp_path / "a.svs"), None)
    np.testing.assert_array_equal(source.open()(source.info.bounds)[:, 0], slide.transpose(2, 0, 1))


def write_imagej_apart(path, gap):
    """Pages of an ImageJ file, whose voxels lie a gap apart, before all other headers."""
    size = IMAGE[0].nbytes
    text = b"ImageJ=1.11a\nimages=3\nslices=3\n\0"
    first = 8 + len(text)
    places = [first + number * (size + gap) for number in range(3)]
    headers = places[-1] + size
    content = bytearray(struct.pack("<2sHI", b"II", 42, headers) + text)
    for page in IMAGE:
        content += page.astype("<u2").tobytes() + b"\xaa" * gap
    content = content[: len(content) - gap]
    for number in range(3):
        tags = {256: 50, 257: 40, 258: 16, 259: 1, 262: 1, 273: places[number], 277: 1, 278: 40}
        tags[279] = size
        entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
        if number == 0:
            entries.insert(5, struct.pack("<HHII", 270, 2, len(text), 8))
        behind = len(content) + 2 + 12 * len(entries) + 4
        following = 0 if number == 2 else behind
        content += struct.pack("<H", len(entries)) + b"".join(entries)
        content += struct.pack("<I", following)
    path.write_bytes(content)


@pytest.mark.parametrize("gap", [0, 64])
def test_pages_of_imagej_that_lie_apart(tmp_path, gap):
    """tifffile takes them for one array, which begins with the first one."""
    path = tmp_path / "a.tif"
    write_imagej_apart(path, gap)
    source = tiff_source(str(path), None)
    np.testing.assert_array_equal(source.open()(source.info.bounds)[0], IMAGE)


@pytest.mark.parametrize("options", [{"tile": (16, 16)}, {"rowsperstrip": 8}, {}], ids=str)
@pytest.mark.parametrize("place", ["header", "tags"])
@pytest.mark.parametrize("is_big", [False, True])
def test_the_files_own_tags_are_no_voxels(tmp_path, options, place, is_big):
    path = tmp_path / "a.tif"
    tifffile.imwrite(
        path, IMAGE[:2], photometric="minisblack", metadata=None, bigtiff=is_big, **options
    )
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        page = tiff.pages[1].aspage()
        offsets = list(page.dataoffsets)
        offsets[-1] = 3 if place == "header" else page.offset
        tag = "TileOffsets" if "tile" in options else "StripOffsets"
        page.tags[tag].overwrite(tuple(offsets) if len(offsets) > 1 else offsets[0])
    source = tiff_source(str(path), None)
    with pytest.raises(PermanentReadError, match="among the file's own tags"):
        source.open()(source.info.bounds)


def test_tiles_of_several_slices_are_refused(tmp_path):
    options = {"volumetric": True, "tile": (16, 16, 16)}
    tifffile.imwrite(tmp_path / "a.tif", IMAGE, photometric="minisblack", **options)
    with pytest.raises(VolumeError, match="in tiles of 16 slices"):
        tiff_source(str(tmp_path / "a.tif"), None)


def test_a_predictor_without_compression_is_refused(tmp_path):
    """Some programs apply it then, others do not."""
    path = tmp_path / "a.tif"
    options = {"compression": "zlib", "predictor": True}
    tifffile.imwrite(path, IMAGE, photometric="minisblack", **options)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        tiff.pages[0].tags["Compression"].overwrite(1)
    with pytest.raises(VolumeError, match="as differences of neighbours"):
        tiff_source(str(path), None)


def shorten(path, number, part, tag):
    """State fewer bytes for the last segment of a page."""
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        page = tiff.pages[number].aspage()
        counts = list(page.databytecounts)
        counts[-1] = int(counts[-1] * part)
        page.tags[tag].overwrite(tuple(counts))


def test_a_tile_at_the_border_that_is_too_short(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, IMAGE[:, :32, :24].copy(), photometric="minisblack", tile=(16, 16))
    shorten(path, 0, 0.5, "TileByteCounts")
    source = tiff_source(str(path), None)
    with pytest.raises(PermanentReadError, match="has 256 bytes, and its values need 512"):
        source.open()(source.info.bounds)


@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_strip_of_jpeg_that_was_cut_off(tmp_path, part):
    pytest.importorskip("imagecodecs")
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 255, (2, 48, 64), np.uint8)
    tifffile.imwrite(path, image, photometric="minisblack", compression="jpeg", rowsperstrip=16)
    source = tiff_source(str(path), None)
    source.open()(source.info.bounds)
    shorten(path, 1, part, "StripByteCounts")
    source = tiff_source(str(path), None)
    with pytest.raises(PermanentReadError, match="it is damaged: (Corrupt|Premature)"):
        source.open()(source.info.bounds)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("cut", [{"tile": (16, 32)}, {"rowsperstrip": 20}])
@pytest.mark.parametrize("compression", ["jpegxl", "jpegxr", "lerc", "webp"])
def test_strips_and_tiles_that_are_pictures(tmp_path, compression, cut, samples):
    pytest.importorskip("imagecodecs")
    if compression == "webp" and samples == 1:
        return  # it knows colours only
    colours = (samples,) if samples > 1 else ()
    image = np.random.default_rng(0).integers(0, 255, (2, 50, 70, *colours), np.uint8)
    tifffile.imwrite(
        tmp_path / "a.tif",
        image,
        photometric="rgb" if colours else "minisblack",
        compression=compression,
        compressionargs={"lossless": True} if compression == "webp" else None,
        **cut,
    )
    source = tiff_source(str(tmp_path / "a.tif"), None)
    expected = np.moveaxis(image, -1, 0) if colours else image[None]
    read = source.open()
    np.testing.assert_array_equal(read(source.info.bounds), expected)
    box = BoundingBox((1, 13, 30), (2, 45, 69))
    np.testing.assert_array_equal(read(box), expected[:, 1:2, 13:45, 30:69])


@pytest.mark.parametrize(("compression", "is_told"), [("jpeg", False), (None, True)])
def test_colours_that_the_decoder_makes_red_green_and_blue(tmp_path, compression, is_told):
    pytest.importorskip("imagecodecs")
    image = np.full((32, 32, 3), (200, 30, 90), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="ycbcr", compression=compression)
    source = tiff_source(str(tmp_path / "a.tif"), None)
    assert any("colour space" in note for note in source.info.notes) == is_told


def write_lsm(path, array, *, depth, times, has_thumbnails, compression=None):
    """Pages as Zeiss's microscopes write them, with a thumbnail behind each."""
    info = np.zeros(1, np.dtype(tifffile.TIFF.CZ_LSMINFO))
    _, height, width = array.shape
    info["MagicNumber"] = 67127628
    info["StructureSize"] = info.dtype.itemsize
    stated = {"X": width, "Y": height, "Z": depth, "Channels": 1, "Time": times}
    for name, extent in stated.items():
        info[f"Dimension{name}"] = extent
    tag = (34412, "B", info.nbytes, info.tobytes(), True)
    options = {"metadata": None, "contiguous": False}
    with tifffile.TiffWriter(path, byteorder="<") as file:
        for number, page in enumerate(array):
            tags = [] if number else [tag]
            file.write(page, extratags=tags, compression=compression, **options)
            if has_thumbnails:
                file.write(np.zeros((8, 8), np.uint8), subfiletype=1, **options)


@pytest.mark.parametrize(
    ("depth", "times", "has_thumbnails"),
    [(6, 1, True), (6, 1, False), (3, 2, False), (12, 1, True), (3, 1, True)],
)
def test_pages_of_lsm_files_go_with_thumbnails(depth, times, has_thumbnails, tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (6, 20, 24), dtype=np.uint8)
    path = tmp_path / "a.tif"
    write_lsm(path, array, depth=depth, times=times, has_thumbnails=has_thumbnails)
    if (depth, has_thumbnails) == (6, True):
        source = tiff_source(str(path), "0")
        np.testing.assert_array_equal(source.open()(source.info.bounds)[0], array)
        return
    with pytest.raises(VolumeError, match="is an LSM file that says it holds"):
        tiff_source(str(path), "0")


def test_pages_of_packed_lsm_files(tmp_path):
    """tifffile makes no whole pages of the later ones."""
    pytest.importorskip("imagecodecs")
    array = np.random.default_rng(0).integers(0, 256, (6, 20, 24), dtype=np.uint8)
    path = tmp_path / "a.tif"
    write_lsm(path, array, depth=6, times=1, has_thumbnails=True, compression="lzw")
    source = tiff_source(str(path), "0")
    np.testing.assert_array_equal(source.open()(source.info.bounds)[0], array)
