"""TIFF files and stacks of slices: order, gaps, differences, and windows against the whole."""

import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from foreign_files import tiff_bytes, write_file
from PIL import Image
from source_volumes import assert_holds, random_array, save_slices, source_of

from beam_inference.conversion.stacks import natural_key, numbering_notes
from beam_inference.errors import PermanentReadError, VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "int16"])
@pytest.mark.parametrize(
    "layout", [{}, {"rows": 7}, {"tile": 16}], ids=["whole", "strips", "tiles"]
)
def test_tiff_of_many_pages(tmp_path, order, dtype, layout):
    array = random_array(dtype, (4, 37, 41))
    source = source_of(write_file(tmp_path / "a.tif", tiff_bytes(array, order=order, **layout)))
    assert_holds(source, array)
    if "tile" in layout:
        assert source.info.grain == (1, 16, 16)


@pytest.mark.parametrize("compression", ["tiff_deflate", "packbits", "tiff_lzw"])
def test_tiff_that_pillow_compressed(tmp_path, compression):
    array = random_array("uint8", (5, 40, 30))
    pages = [Image.fromarray(plane) for plane in array]
    pages[0].save(
        tmp_path / "a.tif", save_all=True, append_images=pages[1:], compression=compression
    )
    if compression == "tiff_lzw":
        pytest.importorskip("imagecodecs", reason="LZW needs imagecodecs, which is not installed")
    assert_holds(source_of(tmp_path / "a.tif"), array)


def test_a_codec_that_is_not_there_is_named(tmp_path):
    Image.fromarray(random_array("uint8", (40, 30))).save(
        tmp_path / "a.tif", compression="tiff_lzw"
    )
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        with pytest.raises(VolumeError, match="LZW compression.*pip install imagecodecs"):
            source_of(tmp_path / "a.tif")


def test_tiff_with_interleaved_channels(tmp_path):
    array = random_array("uint8", (5, 20, 30, 3))
    pages = [Image.fromarray(plane) for plane in array]
    pages[0].save(
        tmp_path / "a.tif", save_all=True, append_images=pages[1:], compression="tiff_deflate"
    )
    assert_holds(source_of(tmp_path / "a.tif"), np.moveaxis(array, -1, 0))


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("axes", ["ZYX", "CZYX", "ZCYX"])
def test_tiff_as_imagej_and_microscopes_write_it(tmp_path, compression, axes):
    import tifffile

    array = random_array("uint16", (3, 4, 20, 30)[-len(axes) :])
    metadata = {
        "axes": axes,
        "PhysicalSizeX": 4,
        "PhysicalSizeXUnit": "nm",
        "PhysicalSizeY": 0.004,
    }
    metadata |= {"PhysicalSizeZ": 0.04, "PhysicalSizeZUnit": "µm"}
    tifffile.imwrite(tmp_path / "a.ome.tif", array, metadata=metadata, compression=compression)
    czyx = array.swapaxes(0, 1) if axes == "ZCYX" else array
    assert_holds(source_of(tmp_path / "a.ome.tif"), czyx, (40.0, 4.0, 4.0))
    imagej = array.swapaxes(0, 1) if axes == "CZYX" else array
    tifffile.imwrite(
        tmp_path / "j.tif",
        imagej,
        imagej=True,
        resolution=(125, 250),
        compression=compression,
        metadata={"axes": axes.replace("CZ", "ZC"), "spacing": 0.04, "unit": "um"},
    )
    assert_holds(source_of(tmp_path / "j.tif"), czyx, (40.0, 4.0, 8.0))


def test_tiff_with_several_images(tmp_path):
    import tifffile

    array = random_array("uint8", (4, 20, 30))
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        tiff.write(array[0, :5, :5], photometric="minisblack")
        tiff.write(array, photometric="minisblack")
    with pytest.raises(VolumeError, match="holds 2 images.*--dataset 0 … 1"):
        source_of(tmp_path / "a.tif")
    assert_holds(source_of(tmp_path / "a.tif", "1"), array)


def test_broken_tiffs(tmp_path):
    content = tiff_bytes(random_array("uint16", (4, 20, 30)))
    with pytest.raises(VolumeError, match="cannot be read as TIFF"):
        source_of(write_file(tmp_path / "a.tif", b"II nonsense"))
    with pytest.raises(VolumeError):
        source_of(write_file(tmp_path / "a.tif", content[:500]))


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_folder_of_slices(tmp_path, suffix, dtype):
    array = random_array(dtype, (12, 20, 30))
    folder = save_slices(tmp_path / "s", array, f"s{{}}.{suffix}")
    (folder / "notes.txt").write_text("no slice")
    source = source_of(folder)
    assert_holds(source, array)
    assert source.info.notes == ()
    assert source.info.grain == ((1, 20, 30) if suffix == "png" else (1, 1, 1))
    assert_holds(source_of(f"{folder}/s1?.{suffix}"), array[10:])


@pytest.mark.parametrize("channels", [3, 4])
def test_slices_with_channels(tmp_path, channels):
    array = random_array("uint8", (3, 20, 30, channels))
    assert_holds(source_of(save_slices(tmp_path / "s", array)), np.moveaxis(array, -1, 0))


def test_jpeg_slices_are_what_pillow_decodes(tmp_path):
    ramp = np.add.outer(np.arange(20), np.arange(30)).astype(np.uint8)
    folder = save_slices(tmp_path / "s", [ramp, ramp + 9], "s{}.jpg")
    expected = np.stack([np.asarray(Image.open(folder / f"s{z}.jpg")) for z in range(2)])
    assert_holds(source_of(folder), expected)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_slice_of_which_the_end_is_lost(tmp_path, progressive):
    """It ends as others do, and Pillow would leave the rest grey."""
    image = np.random.default_rng(0).integers(0, 256, (40, 30), np.uint8)
    for name in ("s0.jpg", "s1.jpg"):
        Image.fromarray(image).save(tmp_path / name, progressive=progressive)
    source = source_of(tmp_path)
    source.open()(source.info.bounds)
    content = (tmp_path / "s1.jpg").read_bytes()
    (tmp_path / "s1.jpg").write_bytes(content[: len(content) // 2] + b"\xff\xd9")
    with pytest.raises(PermanentReadError, match=r"s1.jpg: (it is damaged|broken data stream)"):
        source_of(tmp_path).open()(source.info.bounds)


def test_big_endian_tiff_slices(tmp_path):
    array = random_array("uint16", (3, 20, 30))
    for z in range(3):
        write_file(tmp_path / f"{z}.tif", tiff_bytes(array[z : z + 1], rows=6))
    assert_holds(source_of(tmp_path), array)


def test_names_are_sorted_as_people_do():
    names = ["s10", "s9", "s1b2", "s1b10", "a2", "s01", "s1"]
    assert sorted(names, key=natural_key) == ["a2", "s01", "s1", "s1b2", "s1b10", "s9", "s10"]


@pytest.mark.parametrize(
    "names",
    [
        ["z0.75um", "z1um", "z1.25um", "z1.5um"],
        ["z9.5", "z9.75", "z10", "z10.25"],
    ],
)
def test_numbers_that_may_be_decimals_are_refused(tmp_path, names):
    for name in names:
        write_file(tmp_path / f"{name}.tif", tiff_bytes(random_array("uint8", (1, 4, 5))))
    with pytest.raises(VolumeError, match="may be decimals or two numbers.*Rename them"):
        source_of(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        [f"s1.{number}" for number in range(1, 13)],
        ["z0.50", "z0.75", "z1.00", "z1.25"],
        ["a_v1.2_s9", "a_v1.2_s10", "a_v1.2_s11"],
        ["2024.01.2_s1", "2024.01.2_s2"],
    ],
)
def test_numbers_with_points_whose_order_is_clear(tmp_path, names):
    array = random_array("uint8", (len(names), 4, 5))
    for name, plane in zip(names, array, strict=True):
        write_file(tmp_path / f"{name}.tif", tiff_bytes(plane[None]))
    assert_holds(source_of(tmp_path), array)


def test_gaps_are_told_of():
    assert numbering_notes(["s1.png", "s2.png", "s3.png"]) == ()
    assert numbering_notes(["s10_4nm.png", "s20_4nm.png", "s30_4nm.png"]) == ()
    assert numbering_notes(["one.png"]) == ()
    (told,) = numbering_notes(["s1.png", "s2.png", "s4.png", "s5.png", "s9.png"])
    assert told.startswith("slices are missing, and those behind them move up: 3, 6 … 8;")
    (told,) = numbering_notes(["a1.png", "b1.png"])
    assert "no single numbering" in told
    assert "no single numbering" in numbering_notes(["s1_1.png", "s2_2.png"])[0]
    with pytest.raises(VolumeError, match="two slices have one number: s01.png and s1.png"):
        numbering_notes(["s01.png", "s1.png", "s2.png"])
    with pytest.raises(VolumeError, match="two slices have one number"):
        numbering_notes(["s01.png", "s1.png"])


def test_slices_that_differ_are_refused_with_names(tmp_path):
    array = random_array("uint8", (5, 20, 30))
    folder = save_slices(tmp_path / "s", array)
    Image.fromarray(array[0, :, :29]).save(folder / "s2.png")
    with pytest.raises(
        VolumeError, match=r"4 such as s0.png: 20 × 30 .*; 1 such as s2.png: 20 × 29"
    ):
        source_of(folder)
    Image.fromarray(array[0].astype(np.uint16)).save(folder / "s2.png")
    with pytest.raises(VolumeError, match="1 such as s2.png.*uint16"):
        source_of(folder)
    (folder / "s2.tif").write_bytes(b"")
    with pytest.raises(VolumeError, match="several kinds"):
        source_of(folder)


def test_what_pillow_would_change_is_refused(tmp_path):
    Image.fromarray(np.zeros((4, 4), bool)).save(tmp_path / "bits.png")
    with pytest.raises(VolumeError, match="has 1 bits"):
        source_of(tmp_path / "bits.png")
    Image.fromarray(np.zeros((4, 4, 4), np.uint8), "CMYK").save(tmp_path / "c.jpg")
    with pytest.raises(VolumeError, match="mode CMYK"):
        source_of(tmp_path / "c.jpg")
    header = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + b"IHDR"
    header += (4).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])  # sixteen bits, three colours
    chunk = header + zlib.crc32(header[12:]).to_bytes(4, "big")
    for kind, data in ((b"IDAT", zlib.compress(bytes(4 * 25))), (b"IEND", b"")):
        chunk += (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )
    with pytest.raises(VolumeError, match="16 bits a channel in PNG's colour type 2"):
        source_of(write_file(tmp_path / "deep.png", chunk))


@pytest.mark.parametrize("rows", [3, 5])
def test_rows_that_the_header_does_not_state_are_refused(rows, tmp_path):
    Image.fromarray(random_array("uint8", (rows, 6))).save(tmp_path / "a.png")
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[20:24] = (4).to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(content)
    source = source_of(tmp_path)
    with pytest.raises(PermanentReadError, match="bytes.* of rows, and its header requires 28"):
        source.open()(source.info.bounds)


def test_tables_of_colours_are_dropped_and_values_kept(tmp_path):
    values = random_array("uint8", (3, 20, 30))
    for z, plane in enumerate(values):
        image = Image.fromarray(plane, "L").convert("P")
        image.putdata(plane.ravel().tolist())
        image.save(tmp_path / f"{z}.png")
    source = source_of(tmp_path)
    assert_holds(source, values)


def test_nothing_there(tmp_path):
    with pytest.raises(VolumeError, match="matches no slices"):
        source_of(tmp_path)
    with pytest.raises(VolumeError, match="matches no slices"):
        source_of(f"{tmp_path}/*.png")


def test_a_slice_that_is_removed_while_others_are_read(tmp_path):
    folder = save_slices(tmp_path / "s", random_array("uint8", (5, 20, 30)))
    source = source_of(folder)
    read = source.open()
    (folder / "s4.png").unlink()
    with pytest.raises(PermanentReadError, match="cannot read .*s4.png: No such file"):
        read(source.info.bounds)


def test_slices_that_change_after_the_launch(tmp_path):
    folder = save_slices(tmp_path / "s", random_array("uint8", (5, 20, 30)))
    source = source_of(folder)
    data = (folder / "s3.png").read_bytes()
    (folder / "s3.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(WorkerFault, match="s3.png was changed since the launch read its header"):
        source.open()(source.info.bounds)
    with pytest.raises(PermanentReadError, match="s3.png"):
        source_of(folder).open()(source.info.bounds)
    assert source_of(folder).identity != source.identity
    (folder / "s3.png").unlink()
    with pytest.raises(WorkerFault, match="are not those that were there"):
        source.open()
    box = BoundingBox((3, 2, 3), (4, 5, 9))
    assert source_of(folder).open()(box).shape == (1, 1, 3, 6)


@pytest.mark.parametrize("put", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_a_slice_that_is_no_file_is_refused(tmp_path, put):
    save_slices(tmp_path / "s", random_array("uint8", (4, 20, 30)))
    last = max((tmp_path / "s").iterdir())
    last.unlink()
    put(last)
    with pytest.raises(VolumeError, match="has the name of a slice, and is a folder or the like"):
        source_of(tmp_path / "s")


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_strip_of_no_bytes_is_left_out_or_damaged(tmp_path, is_sparse):
    import tifffile

    array = random_array("uint8", (20, 30))
    keys = {"compression": "zlib", "rowsperstrip": 5, "extratags": [(42113, "s", 0, "7", True)]}
    tifffile.imwrite(tmp_path / "a.tif", array, **keys)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        page = tiff.pages[0]
        counts = [*page.databytecounts]
        offsets = [*page.dataoffsets]
        counts[1] = 0
        page.tags[279].overwrite(counts)
        if is_sparse:
            offsets[1] = 0
            page.tags[273].overwrite(offsets)
    source = source_of(tmp_path / "a.tif")
    if is_sparse:
        array[5:10] = 7
        assert_holds(source, array[None])
        return
    with pytest.raises(PermanentReadError, match="cut off"):
        source.open()(source.info.bounds)


def test_a_unit_of_imagej_for_z_alone(tmp_path):
    import tifffile

    array = random_array("uint8", (3, 20, 30))
    for unit, size in (("nm", (40.0, 4.0, 4.0)), ("pixel", None)):
        metadata = {"axes": "ZYX", "spacing": 40, "unit": "um", "zunit": unit}
        tifffile.imwrite(
            tmp_path / "a.tif", array, imagej=True, resolution=(250, 250), metadata=metadata
        )
        assert_holds(source_of(tmp_path / "a.tif"), array, size)


def write_ome_slices(folder, places, **sizes):
    """Slices that are planes (z, c, t) of one OME data set, each at the place it says."""
    import tifffile

    folder.mkdir()
    names = [f"s{number}.ome.tif" for number in range(len(places))]
    data = "".join(
        f'<TiffData FirstZ="{z}" FirstC="{c}" FirstT="{t}" IFD="0" PlaneCount="1">'
        f'<UUID FileName="{name}">urn:uuid:{name}</UUID></TiffData>'
        for name, (z, c, t) in zip(names, places, strict=True)
    )
    stated = "".join(f' {name}="{count}"' for name, count in sizes.items())
    for number, name in enumerate(names):
        text = (
            f'<?xml version="1.0"?><OME UUID="urn:uuid:{name}"><Image ID="Image:0"><Pixels '
            f'ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="6" SizeY="5"{stated}>{data}'
            "</Pixels></Image></OME>"
        )
        image = np.full((5, 6), number, np.uint8)
        tifffile.imwrite(folder / name, image, description=text, metadata=None)


@pytest.mark.parametrize(
    ("places", "sizes", "message"),
    [
        ([(2, 0, 0), (1, 0, 0), (0, 0, 0)], {"SizeZ": 3}, "would be slice 1 .* state z 1"),
        ([(0, 0, 0), (0, 1, 0)], {"SizeZ": 1, "SizeC": 2}, "image 0, channel 1, time 0"),
        ([(0, 0, 0), (0, 0, 1)], {"SizeZ": 1, "SizeT": 2}, "image 0, channel 0, time 1"),
    ],
)
def test_slices_in_another_order_than_their_metadata_are_refused(places, sizes, message, tmp_path):
    """They were read in the order of their names, with exit code 0."""
    write_ome_slices(tmp_path / "slices", places, **sizes)
    with pytest.raises(VolumeError, match=message):
        source_of(tmp_path / "slices")


def test_slices_of_a_data_set_in_its_order_are_read(tmp_path):
    write_ome_slices(tmp_path / "slices", [(z, 0, 0) for z in range(3)], SizeZ=3)
    source = source_of(tmp_path / "slices")
    assert source.info.notes == ()
    voxels = source.open()(source.info.bounds)
    assert [plane.max() for plane in voxels[0]] == [0, 1, 2]
    write_ome_slices(tmp_path / "part", [(z, 0, 0) for z in range(3)], SizeZ=9)
    (note,) = source_of(tmp_path / "part").info.notes
    assert "speak of 9 planes along z, of which 3 are here" in note


def test_slices_that_say_nothing_of_their_own_place_are_read(tmp_path):
    """As where each file has the metadata of the whole recording."""
    write_ome_slices(tmp_path / "slices", [(0, 0, 0)] * 3, SizeZ=3)
    for path in (tmp_path / "slices").iterdir():
        content = re.sub(
            rb"<UUID .*?</UUID>", lambda found: b" " * len(found[0]), path.read_bytes()
        )
        path.write_bytes(content)
    assert source_of(tmp_path / "slices").info.notes == ()
