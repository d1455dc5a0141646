"""Files of microscopes and scanners: CZI, LIF, ND2, IMS, DICOM and whole slides."""

import os
import re
import struct
import sys
from types import SimpleNamespace

import h5py
import imagecodecs
import numpy as np
import pydicom
import pytest
from instrument_files import (
    LIBCZI,
    libczi_voxels,
    lif_bytes,
    nd2_bytes,
    write_dicom,
    write_ims,
    write_svs,
)
from pydicom.encaps import encapsulate
from source_volumes import assert_holds, random_array, source_of

from beam_inference.conversion import czi
from beam_inference.conversion.czi import describe_czi
from beam_inference.conversion.dicom import dicom_series
from beam_inference.conversion.lif import describe_lif
from beam_inference.conversion.nd2 import describe_nd2
from beam_inference.conversion.planes import Image, choose_volume
from beam_inference.conversion.tiff import tiff_source
from beam_inference.errors import ConfigError, PermanentReadError, VolumeError

SIZE = (300.0, 100.0, 100.0)
TIMES = 2


@pytest.fixture(scope="module")
def frames():
    """Voxels of every instrument: (times, channels, z, y, x)."""
    return random_array("uint16", (TIMES, 2, 3, 10, 12))


class TestNames:
    IMAGES = (Image("one"), Image("two", (("S", 2), ("T", 12))), Image("a.b/T1"))

    def test_each_position_is_a_volume(self):
        chosen = choose_volume("x.lif", self.IMAGES, "two/S1/T11")
        assert (chosen.image, chosen.positions) == (1, {"S": 1, "T": 11})
        assert choose_volume("x.lif", self.IMAGES, "a.b/T1").image == 2

    @pytest.mark.parametrize("name", ["two", "two/S2/T0", "two/S0/T12", "axb/T1", "/one", "three"])
    def test_others_are_not(self, name):
        with pytest.raises(
            VolumeError, match=f"no volume {name}; it holds the volumes one, two/S0"
        ):
            choose_volume("x.lif", self.IMAGES, name)

    def test_of_several_one_is_to_be_named(self):
        with pytest.raises(VolumeError, match=r"two/S0/T8 and 16 more: name one with --dataset"):
            choose_volume("x.lif", self.IMAGES, None)

    def test_a_name_of_two_volumes_is_refused(self):
        images = (Image("A", (("T", 2),)), Image("A/T1"))
        assert choose_volume("x.lif", images, "A/T0").image == 0
        with pytest.raises(VolumeError, match="has 2 volumes of the name A/T1"):
            choose_volume("x.lif", images, "A/T1")

    def test_of_many_positions_the_first_are_listed_at_once(self):
        images = [Image("", (("S", 2**31), ("T", 3)))]
        with pytest.raises(VolumeError, match=r"volumes S0/T0, S0/T1, .*S3/T0 and 6442450934 more"):
            choose_volume("x.czi", images, None)
        assert choose_volume("x.czi", images, "S2000000/T2").positions == {"S": 2000000, "T": 2}

    def test_names_are_told_on_one_line(self):
        with pytest.raises(VolumeError) as caught:
            choose_volume("x.lif", [Image("a\nb"), Image("c")], "d\ne")
        assert str(caught.value) == "x.lif has no volume d e; it holds the volumes a b, c"


class TestCzi:
    def test_a_file_of_zeiss_own_library(self):
        source = source_of(LIBCZI)
        assert_holds(source, libczi_voxels(), SIZE)
        assert source.info.grain == (1, 24, 20)

    def test_a_file_that_was_cut_off(self, tmp_path):
        (tmp_path / "a.czi").write_bytes(LIBCZI.read_bytes()[:6000])
        with pytest.raises(VolumeError, match=r"a\.czi ends before"):
            describe_czi(str(tmp_path / "a.czi"), None)

    @pytest.mark.parametrize(("height", "width"), [(48, 10), (20, 24)])
    def test_tiles_of_another_shape_than_the_metadata_state(self, height, width, tmp_path):
        """As many voxels in each, which would be sheared."""
        content = bytearray(LIBCZI.read_bytes())
        at = content.find(b"DV")
        while at >= 0:
            (axes,) = struct.unpack_from("<i", content, at + 28)
            for place in range(at + 32, at + 32 + 20 * axes, 20) if axes == 7 else ():
                axis = bytes(content[place : place + 1])
                if axis in b"XY":
                    size = width if axis == b"X" else height
                    (start,) = struct.unpack_from("<i", content, place + 4)
                    struct.pack_into("<ii", content, place + 4, width if start else 0, size)
                    struct.pack_into("<i", content, place + 16, size)
            at = content.find(b"DV", at + 2)
        (tmp_path / "a.czi").write_bytes(content)
        with pytest.raises(VolumeError, match=f"another shape, .*24 y × 40 x and .*{height} y × "):
            describe_czi(str(tmp_path / "a.czi"), None)

    @pytest.mark.parametrize("axis", "XYZCT")
    def test_sizes_that_the_metadata_state_otherwise_are_told(self, axis, tmp_path):
        content = LIBCZI.read_bytes()
        (stated,) = re.findall(rb"<Size%c>(\d+)<" % ord(axis), content)
        other = str(int(stated) + 1).encode()
        content = content.replace(
            b"<Size%c>%s<" % (ord(axis), stated), b"<Size%c>%s<" % (ord(axis), other)
        )
        (tmp_path / "a.czi").write_bytes(content)
        info = describe_czi(str(tmp_path / "a.czi"), None).info
        assert info.bounds.shape == (3, 24, 40)
        assert "state other sizes" in info.notes[-1]
        assert f"{other.decode()} {axis.lower()}" in info.notes[-1]

    def test_a_damaged_tile(self, tmp_path):
        content = bytearray(LIBCZI.read_bytes())
        place = content.rindex(struct.pack("<I", 0xFD2FB528))  # Zstandard's mark
        content[place : place + 16] = bytes(16)
        (tmp_path / "a.czi").write_bytes(content)
        source = describe_czi(str(tmp_path / "a.czi"), None)
        with pytest.raises(PermanentReadError, match=r"cannot read plane \d of .*a\.czi"):
            source.open()(source.info.bounds)

    @pytest.mark.parametrize("samples", [1, 3])
    @pytest.mark.parametrize(("compression", "codec"), [(1, "jpeg8"), (4, "jpegxr")])
    def test_tiles_that_are_pictures(self, compression, codec, samples):
        """One of another extent than the file states is refused before it is decoded."""
        encode = getattr(imagecodecs, f"{codec}_encode")
        colours = (samples,) if samples > 1 else ()
        picture = np.full((24, 20, *colours), 77, np.uint8)
        entry = SimpleNamespace(compression=compression, dtype=np.dtype(("u1", colours)))
        found = czi._decode(encode(picture), czi._Tile(entry, {}, (24, 20)))
        assert found.shape == (samples, 24, 20)
        assert np.abs(found.astype(int) - 77).max() <= 2
        content = encode(np.zeros((600, 900, *colours), np.uint8))
        with pytest.raises(ValueError, match=r"invalid out\.shape"):
            czi._decode(content, czi._Tile(entry, {}, (24, 20)))

    def test_a_file_that_is_not_complete(self, tmp_path):
        content = bytearray(LIBCZI.read_bytes())
        content[32 + 68 : 32 + 72] = struct.pack("<i", 1)  # update pending
        (tmp_path / "a.czi").write_bytes(content)
        with pytest.raises(VolumeError, match="not completed by the microscope.*Open it in ZEN"):
            describe_czi(str(tmp_path / "a.czi"), None)

    def test_a_list_that_names_other_tiles(self, tmp_path):
        content = bytearray(LIBCZI.read_bytes())
        first, second = czi_entries(content)[:2]
        place = slice(first + 6, first + 14)
        content[place] = content[second + 6 : second + 14]
        (tmp_path / "a.czi").write_bytes(content)
        source = describe_czi(str(tmp_path / "a.czi"), None)
        with pytest.raises(PermanentReadError, match="a tile says that it lies at .*the list of"):
            source.open()(source.info.bounds)

    def test_a_list_that_states_another_compression(self, tmp_path):
        content = bytearray(LIBCZI.read_bytes())
        first = czi_entries(content)[0]
        content[first + 18 : first + 22] = struct.pack("<i", 0 if content[first + 18] else 2)
        (tmp_path / "a.czi").write_bytes(content)
        source = describe_czi(str(tmp_path / "a.czi"), None)
        with pytest.raises(PermanentReadError, match="a tile says that it holds .*compression"):
            source.open()(source.info.bounds)

    @pytest.mark.parametrize("size", [0, -5])
    def test_a_tile_of_no_size(self, tmp_path, size):
        content = bytearray(LIBCZI.read_bytes())
        first = czi_entries(content)[0]
        names = [bytes(content[n : n + 4]) for n in range(first + 32, first + 32 + 4 * 20, 20)]
        place = first + 32 + 20 * names.index(b"X\0\0\0")
        for field in (8, 16):  # size, and stored size
            content[place + field : place + field + 4] = struct.pack("<i", size)
        (tmp_path / "a.czi").write_bytes(content)
        with pytest.raises(VolumeError, match="lists a tile of no size: it is damaged"):
            describe_czi(str(tmp_path / "a.czi"), None)

    def test_two_positions_along_an_axis(self, tmp_path):
        content = bytearray(LIBCZI.read_bytes())
        first = czi_entries(content)[0]
        names = [bytes(content[n : n + 4]) for n in range(first + 32, first + 32 + 4 * 20, 20)]
        place = first + 32 + 20 * names.index(b"Z\0\0\0")
        content[place : place + 4] = b"X\0\0\0"
        (tmp_path / "a.czi").write_bytes(content)
        with pytest.raises(VolumeError, match="two positions along one axis"):
            describe_czi(str(tmp_path / "a.czi"), None)


def czi_entries(content):
    """Where the entries of the list of tiles begin."""
    (position,) = struct.unpack("<q", content[32 + 52 : 32 + 60])
    (count,) = struct.unpack("<i", content[position + 32 : position + 36])
    places = [position + 32 + 128]
    while len(places) < count:
        (axes,) = struct.unpack("<i", content[places[-1] + 28 : places[-1] + 32])
        places.append(places[-1] + 32 + 20 * axes)
    assert all(content[place : place + 2] == b"DV" for place in places)
    return places


class TestLif:
    def test_images_are_chosen_by_name(self, frames, tmp_path):
        path = tmp_path / "a.lif"
        path.write_bytes(lif_bytes({"one": frames[:1], "two": frames}))
        assert_holds(describe_lif(str(path), "one"), frames[0], SIZE)
        assert_holds(describe_lif(str(path), "two/T1"), frames[1], SIZE)
        assert_holds(source_of(f"{path}:one"), frames[0], SIZE)
        with pytest.raises(VolumeError, match="the volumes one, two/T0, two/T1: name one"):
            describe_lif(str(path), None)

    @pytest.mark.parametrize("dtype", ["uint8", "float32"])
    def test_dtypes(self, dtype, tmp_path):
        array = random_array(dtype, (1, 1, 3, 6, 7))
        (tmp_path / "a.lif").write_bytes(lif_bytes({"a": array}))
        assert_holds(describe_lif(str(tmp_path / "a.lif"), None), array[0], SIZE)

    def test_a_file_that_was_cut_off(self, frames, tmp_path):
        (tmp_path / "a.lif").write_bytes(lif_bytes({"one": frames[:1]})[:-9])
        with pytest.raises(VolumeError, match=r"a\.lif"):
            describe_lif(str(tmp_path / "a.lif"), None)

    @pytest.mark.parametrize(
        ("stride", "message"),
        [
            (480, r"ends before its image .*takes 1200 bytes"),
            (120, "planes of 240 bytes that would overlap"),
        ],
    )
    def test_strides_that_lead_to_other_voxels(self, stride, message, frames, tmp_path):
        """They lead into the next image, or a plane into the next one."""
        images = {"one": frames[:1, :1], "two": frames[:1]}
        content = lif_bytes(images)
        stated, other = (f'BytesInc="{n}"'.encode("utf-16-le") for n in (240, stride))
        first = content.index(stated)
        (tmp_path / "a.lif").write_bytes(content[:first] + other + content[first + len(stated) :])
        with pytest.raises(VolumeError, match=message):
            describe_lif(str(tmp_path / "a.lif"), "one")

    @pytest.mark.parametrize(
        ("stated", "other"),
        [
            ('BytesInc="2400"', 'BytesInc="2398"'),
            ('BytesInc="2400"', 'BytesInc="2000"'),
            ('BytesInc="2400"', 'BytesInc="0480"'),
            ('Resolution="16"', 'Resolution="08"'),
        ],
    )
    def test_channels_that_lie_in_each_other(self, stated, other, tmp_path):
        """By where they begin, and by two samples of a byte for one of two."""
        content = lif_bytes({"a": random_array("uint16", (1, 2, 5, 12, 20))})
        stated, other = (text.encode("utf-16-le") for text in (stated, other))
        assert stated in content
        (tmp_path / "a.lif").write_bytes(content.replace(stated, other))
        with pytest.raises(VolumeError, match="bytes that would overlap"):
            describe_lif(str(tmp_path / "a.lif"), None)

    def test_planes_of_channels_that_take_turns(self, tmp_path):
        array = random_array("uint16", (1, 2, 5, 12, 20))
        stored = np.ascontiguousarray(array.swapaxes(1, 2)).reshape(array.shape)
        content = lif_bytes({"a": stored})
        for stated, other in (("480", "960"), ("2400", "0480")):
            of_axis, replaced = (f'BytesInc="{n}"'.encode("utf-16-le") for n in (stated, other))
            assert content.count(of_axis) == 1
            content = content.replace(of_axis, replaced)
        (tmp_path / "a.lif").write_bytes(content)
        assert_holds(describe_lif(str(tmp_path / "a.lif"), None), array[0], SIZE)

    def test_images_of_one_name_are_refused(self, frames, tmp_path):
        content = lif_bytes({"one": frames[:1], "two": frames[:1]})
        two, one = (f'Name="{name}"'.encode("utf-16-le") for name in ("two", "one"))
        (tmp_path / "a.lif").write_bytes(content.replace(two, one))
        with pytest.raises(VolumeError, match="several images of the name project/one"):
            describe_lif(str(tmp_path / "a.lif"), "project/one")

    @pytest.mark.parametrize(
        ("unit", "unit_nm"), [("µm", 1e3), ("nm", 1.0), ("inch", 2.54e7), ("Ks", None), ("", None)]
    )
    def test_units_of_length(self, unit, unit_nm, frames, tmp_path):
        content = lif_bytes({"a": frames[:1]}, unit=unit, unit_nm=unit_nm or 1.0)
        (tmp_path / "a.lif").write_bytes(content)
        found = describe_lif(str(tmp_path / "a.lif"), None).info.voxel_size_nm
        assert found == (None if unit_nm is None else pytest.approx(SIZE))

    def test_other_files_are_not_followed(self, frames, tmp_path):
        outside = tmp_path / "outside.lif"
        outside.write_bytes(lif_bytes({"secret": frames[:1]}))
        head = f'<Children><Reference File="{outside}"/></Children>'
        (tmp_path / "a.lif").write_bytes(lif_bytes({"one": frames[:1]}, head=head))
        with pytest.raises(VolumeError, match="names other files"):
            describe_lif(str(tmp_path / "a.lif"), None)


class TestNd2:
    @pytest.mark.parametrize("packed", [False, True])
    def test_times_are_chosen_by_name(self, packed, frames, tmp_path):
        path = tmp_path / "a.nd2"
        path.write_bytes(nd2_bytes(frames.swapaxes(1, 2), packed=packed))
        for time in range(TIMES):
            assert_holds(describe_nd2(str(path), f"T{time}"), frames[time], SIZE)
        with pytest.raises(VolumeError, match="the volumes T0, T1: name one"):
            describe_nd2(str(path), None)

    @pytest.mark.parametrize("loops", [False, True])
    def test_one_volume_needs_no_name(self, loops, frames, tmp_path):
        content = nd2_bytes(frames[:1].swapaxes(1, 2), loops_over_one_time=loops)
        (tmp_path / "a.nd2").write_bytes(content)
        assert_holds(source_of(tmp_path / "a.nd2"), frames[0], SIZE)

    def test_frames_that_are_absent_are_no_zeros(self, frames, tmp_path):
        content = nd2_bytes(frames[:1].swapaxes(1, 2))
        (tmp_path / "a.nd2").write_bytes(content.replace(b"ImageDataSeq|1!", b"ImageDataSeq|9!"))
        with pytest.raises(VolumeError, match="lacks 1 of its 3 frames, the first is 1"):
            describe_nd2(str(tmp_path / "a.nd2"), None)

    def test_a_frame_shorter_than_is_stated_is_not_read_on_into_the_next(self, frames, tmp_path):
        row = frames.shape[-1] * frames.shape[1] * frames.itemsize
        for more in (0, frames.itemsize):
            content = nd2_bytes(frames[:1].swapaxes(1, 2), row_bytes=row + more)
            (tmp_path / "a.nd2").write_bytes(content)
            if more:
                with pytest.raises(VolumeError, match="lacks 3 of its 3 frames, the first is 0"):
                    describe_nd2(str(tmp_path / "a.nd2"), None)
            else:
                assert_holds(describe_nd2(str(tmp_path / "a.nd2"), None), frames[0], SIZE)

    @pytest.mark.parametrize("stated", [{"uiWidth": 6}, {"uiBpcInMemory": 8}], ids=str)
    def test_rows_of_less_than_they_hold(self, stated, frames, tmp_path):
        """Half of each row was read, or its bytes as voxels, with exit code 0."""
        (tmp_path / "a.nd2").write_bytes(nd2_bytes(frames[:1].swapaxes(1, 2), **stated))
        with pytest.raises(VolumeError, match="rows of .* voxels of .* bytes, which begin every"):
            describe_nd2(str(tmp_path / "a.nd2"), None)

    def test_rows_that_are_not_stated_are_told(self, frames, tmp_path):
        rows = frames.shape[-2]
        content = nd2_bytes(frames[:1].swapaxes(1, 2), height=rows - 2)
        (tmp_path / "a.nd2").write_bytes(content)
        (note,) = describe_nd2(str(tmp_path / "a.nd2"), None).info.notes
        assert f"2 rows more than the {rows - 2} that it states: these are not read" in note

    def test_frames_that_no_loop_counts(self, frames, tmp_path):
        content = nd2_bytes(frames[:1].swapaxes(1, 2), depth=2)
        (tmp_path / "a.nd2").write_bytes(content)
        with pytest.raises(VolumeError, match="holds 3 frames, and its loops .* state 2"):
            describe_nd2(str(tmp_path / "a.nd2"), None)

    @pytest.mark.parametrize("packed", [False, True])
    def test_rows_that_begin_in_each_other(self, packed, frames, tmp_path):
        content = nd2_bytes(frames[:1].swapaxes(1, 2), row_bytes=24, packed=packed)
        (tmp_path / "a.nd2").write_bytes(content)
        with pytest.raises(VolumeError, match="rows of 12 voxels of 4 bytes, .* every 24 bytes"):
            describe_nd2(str(tmp_path / "a.nd2"), None)

    def test_frames_of_more_rows_than_are_stated(self, frames, tmp_path):
        content = nd2_bytes(frames[:1].swapaxes(1, 2), height=5)
        (tmp_path / "a.nd2").write_bytes(content)
        with pytest.raises(VolumeError, match="states frames of 240 bytes, and holds 480"):
            describe_nd2(str(tmp_path / "a.nd2"), None)

    def test_without_a_calibration_there_is_no_voxel_size(self, frames, tmp_path):
        content = nd2_bytes(frames[:1].swapaxes(1, 2), (0.3, 1, 1), is_calibrated=False)
        (tmp_path / "a.nd2").write_bytes(content)
        assert describe_nd2(str(tmp_path / "a.nd2"), None).info.voxel_size_nm is None

    def test_a_frame_that_unpacks_to_more(self, frames, tmp_path):
        wide = np.zeros((1, 1, 1, 40, 1000), np.uint16)
        content = nd2_bytes(wide, packed=True)
        (tmp_path / "a.nd2").write_bytes(
            content.replace(struct.pack("<I", 40), struct.pack("<I", 10))
        )
        source = describe_nd2(str(tmp_path / "a.nd2"), None)
        with pytest.raises(PermanentReadError, match="unpacks to more than its voxels"):
            source.open()(source.info.bounds)


class TestIms:
    @pytest.mark.parametrize(
        "group", ["DataSet", "DataSet/ResolutionLevel 0/TimePoint 0/Channel 0", "DataSetInfo"]
    )
    def test_no_group_is_looked_for_elsewhere(self, group, frames, tmp_path):
        """HDF5 opened what a link names, and waited for a pipe without end."""
        os.mkfifo(tmp_path / "pipe")
        write_ims(tmp_path / "a.ims", frames[:1])
        with h5py.File(tmp_path / "a.ims", "a") as file:
            del file[group]
            file[group] = h5py.ExternalLink(str(tmp_path / "pipe"), "/g")
        with pytest.raises(VolumeError, match="has a link in place of the group"):
            source_of(tmp_path / "a.ims")

    def test_scales_and_times(self, frames, tmp_path):
        write_ims(tmp_path / "a.ims", frames)
        assert_holds(source_of(tmp_path / "a.ims", "T1"), frames[1], SIZE)
        coarse = frames[0][..., ::2, ::2]
        assert_holds(source_of(tmp_path / "a.ims", "T0", scale=1), coarse, (300.0, 200.0, 200.0))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "scale", "message"),
        [
            (None, 0, "the volumes T0, T1: name one"),
            ("T2", 0, "no volume T2"),
            ("T0", 2, r"scales 0 … 1"),
        ],
    )
    def test_what_is_not_there(self, name, scale, message, frames, tmp_path):
        write_ims(tmp_path / "a.ims", frames)
        with pytest.raises((VolumeError, ConfigError), match=message):
            source_of(tmp_path / "a.ims", name, scale)

    @pytest.mark.parametrize(
        ("unit", "size"),
        [("nm", (300, 100, 100)), ("mm", (3e-4, 1e-4, 1e-4)), ("furlong", (1, 1, 1))],
    )
    def test_units_of_length(self, unit, size, frames, tmp_path):
        write_ims(tmp_path / "a.ims", frames[:1], size, unit=unit)
        found = source_of(tmp_path / "a.ims").info.voxel_size_nm
        assert found == (None if unit == "furlong" else pytest.approx(SIZE))

    @pytest.mark.parametrize(
        ("size", "message"),
        [(4, r"states \(3, 4, 12\) voxels .* holds \(8, 16, 16\)"), (0, "size")],
    )
    def test_sizes_that_are_not_stored(self, size, message, frames, tmp_path):
        write_ims(tmp_path / "a.ims", frames[:1], scales=1)
        with h5py.File(tmp_path / "a.ims", "a") as file:
            for channel in file["DataSet/ResolutionLevel 0/TimePoint 0"].values():
                channel.attrs["ImageSizeY"] = np.frombuffer(str(size).encode(), "S1")
        with pytest.raises(VolumeError, match=message):
            source_of(tmp_path / "a.ims")

    @pytest.mark.slow
    def test_hdf5_of_another_kind(self, tmp_path):
        with h5py.File(tmp_path / "a.ims", "w") as file:
            file["v"] = np.zeros((3, 4, 5))
        with pytest.raises(VolumeError, match="no Imaris file"):
            source_of(tmp_path / "a.ims")


class TestDicom:
    def test_a_series_in_the_order_of_positions(self, frames, tmp_path):
        array = frames[0, 0]
        write_dicom(tmp_path / "ct", array, origin_mm=(4, 1, 0.5))
        for place in (tmp_path / "ct", tmp_path / "ct" / "*.dcm"):
            assert_holds(source_of(place), array, (2e6, 5e5, 5e5), (2, 2, 1))

    @pytest.mark.parametrize(
        ("gone", "told"),
        [
            (["ImagePositionPatient"], "no positions in space"),
            (["ImagePositionPatient", "ImageOrientationPatient"], "no positions in space"),
            (["ImageOrientationPatient"], "positions, but not in which directions"),
        ],
    )
    def test_slices_in_the_order_of_their_numbers_are_told(self, gone, told, tmp_path):
        import pydicom

        array = random_array("uint16", (4, 6, 7))
        files = sorted(write_dicom(tmp_path / "ct", array).iterdir())
        for file in files:
            header = pydicom.dcmread(file)
            for key in gone:
                del header[key]
            header.save_as(file)
        (note,) = dicom_series(str(tmp_path / "ct"), None).info.notes
        assert told in note
        assert note.endswith("in the order of their numbers (InstanceNumber)")
        numbers = {int(pydicom.dcmread(file).InstanceNumber): file for file in files}
        numbers[sorted(numbers)[1]].unlink()
        (note,) = dicom_series(str(tmp_path / "ct"), None).info.notes
        assert note.endswith(", of which 1 are missing")

    def test_frames_that_begin_within_a_byte(self, tmp_path):
        keys = {"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0, "NumberOfFrames": 3}
        array = random_array("uint8", (1, 3, 4))
        write_dicom(tmp_path / "seg", array, **keys, PixelData=bytes(6))
        with pytest.raises(VolumeError, match="has frames of 12 bits, which begin within bytes"):
            dicom_series(str(tmp_path / "seg"), None)

    def test_scaled_values_are_floats(self, tmp_path):
        array = random_array("int16", (4, 6, 7))
        write_dicom(tmp_path / "ct", array, intercept=-1024)
        source = source_of(tmp_path / "ct")
        assert "its header scales its values: they are read as float32" in source.info.notes
        assert_holds(source, array.astype(np.float32) - 1024, (2e6, 5e5, 5e5))

    def test_scaled_integers_of_many_digits_are_rounded_once(self, tmp_path):
        array = (np.arange(1, 25).reshape(2, 3, 4) - 2**31).astype(np.int32)
        write_dicom(tmp_path / "ct", array, intercept=2**31)
        expected = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
        assert_holds(source_of(tmp_path / "ct"), expected, (2e6, 5e5, 5e5))

    def test_dose_is_scaled(self, tmp_path):
        array = random_array("uint16", (2, 3, 4))
        write_dicom(tmp_path / "rt", array, DoseGridScaling="0.5")
        assert_holds(source_of(tmp_path / "rt"), array.astype(np.float32) / 2, (2e6, 5e5, 5e5))

    @pytest.mark.parametrize(
        ("further", "message"),
        [
            ({"PixelData": bytes(48)}, "has 48 bytes of pixels, and its header requires 24"),
            ({"PixelData": bytes(22)}, "has 22 bytes of pixels, and its header requires 24"),
            ({"BitsStored": 12}, "keeps its 12 bits of a value below bit 16 of 16"),
        ],
    )
    def test_pixels_that_are_not_those_of_the_header(self, tmp_path, further, message):
        array = random_array("uint16", (2, 3, 4))
        write_dicom(tmp_path / "ct", array, **further)
        with pytest.raises(VolumeError, match=message):
            dicom_series(str(tmp_path / "ct"), None)

    def test_an_odd_number_of_bytes_is_filled_up(self, tmp_path):
        array = random_array("uint8", (2, 3, 3))
        write_dicom(tmp_path / "ct", array)
        assert_holds(source_of(tmp_path / "ct"), array, (2e6, 5e5, 5e5))

    @pytest.mark.parametrize("frames_in_file", [1, 3])
    @pytest.mark.parametrize(("codec", "syntax"), [("jpeg8", ".50"), ("jpeg2k", ".90")])
    def test_pictures(self, codec, syntax, frames_in_file, tmp_path):
        """One of another extent than the file states is refused before it is decoded."""
        encode = getattr(imagecodecs, f"{codec}_encode")
        keys = {"codecformat": "j2k"} if codec == "jpeg2k" else {"level": 95}

        def write(folder, *pictures):
            write_dicom(tmp_path / folder, np.zeros((3, 20, 30), np.uint8))
            paths = sorted((tmp_path / folder).iterdir())
            kept = paths[: 3 // frames_in_file]
            for path in set(paths) - set(kept):
                path.unlink()
            for path in kept:
                data = pydicom.dcmread(path)
                data.PixelData = encapsulate(list(pictures), has_bot=False)
                data["PixelData"].VR = "OB"
                data.NumberOfFrames = len(pictures)
                data.file_meta.TransferSyntaxUID = f"1.2.840.10008.1.2.4{syntax}"
                data.save_as(path)
            return dicom_series(str(tmp_path / folder), None)

        pictures = [encode(np.full((20, 30), 7 * z, np.uint8), **keys) for z in range(1, 4)]
        source = write("sound", *pictures[:frames_in_file])
        found = source.open()(source.info.bounds)
        expected = [7, 14, 21] if frames_in_file == 3 else [7, 7, 7]
        assert np.abs(found[0].mean((1, 2)) - expected).max() < 0.5
        large = encode(np.zeros((600, 900), np.uint8), **keys)
        with pytest.raises(VolumeError, match="20 × 30 holds a picture of 600 × 900"):
            write("large", *[large] * frames_in_file)

    @pytest.mark.parametrize("has_bot", [True, False])
    @pytest.mark.parametrize(("codec", "syntax"), [("jpeg8", ".4.50"), ("rle", ".5")])
    def test_more_frames_than_are_stated(self, codec, syntax, has_bot, tmp_path):
        planes = np.random.default_rng(0).integers(0, 255, (5, 20, 30), np.uint8)

        def write(folder, frames, **stated):
            write_dicom(tmp_path / folder, planes[:1])
            (path,) = (tmp_path / folder).iterdir()
            data = pydicom.dcmread(path)
            data.NumberOfFrames = len(frames)
            for key, value in stated.items():
                setattr(data, key, value)
            data.PixelData = encapsulate(frames, has_bot=has_bot)
            data["PixelData"].VR = "OB"
            data.file_meta.TransferSyntaxUID = f"1.2.840.10008.1.2{syntax}"
            data.save_as(path)
            return dicom_series(str(tmp_path / folder), None)

        def pack(plane):
            if codec == "jpeg8":
                return imagecodecs.jpeg8_encode(plane, level=98)
            runs = b"".join(bytes([29]) + row.tobytes() for row in plane)
            return struct.pack("<16I", 1, 64, *[0] * 14) + runs

        frames = [pack(plane) for plane in planes]
        source = write("sound", frames)
        found = source.open()(source.info.bounds)[0]
        assert np.abs(found.astype(int) - planes).max() <= (0 if codec == "rle" else 40)
        for stated in (1, 4):
            if stated == 1 and not has_bot and codec != "rle":
                continue  # one frame may be in several items
            with pytest.raises(
                VolumeError, match=f"holds 5 frames, and its header states {stated}"
            ):
                write(f"more{stated}", frames, NumberOfFrames=stated)
        if codec == "rle":
            with pytest.raises(VolumeError, match="a frame of .* cannot be unpacked from"):
                write("large", frames, Rows=30000, Columns=30000)

    def test_several_series_are_chosen_by_number(self, frames, tmp_path):
        for number in (1, 2):
            write_dicom(tmp_path / "ct", frames[0, number - 1], series=number)
        assert_holds(source_of(tmp_path / "ct", "2"), frames[0, 1], (2e6, 5e5, 5e5))
        with pytest.raises(VolumeError, match=r"the series 1 \(series 1, 3 files\), 2 \("):
            source_of(tmp_path / "ct")

    def test_missing_slices_are_refused(self, tmp_path):
        write_dicom(tmp_path / "ct", random_array("uint8", (6, 4, 4)))
        for path in (tmp_path / "ct").iterdir():
            if path.read_bytes().count(b"\\6.0"):
                path.unlink()
        with pytest.raises(VolumeError, match="missing.* is 4 mm behind .* the median is 2 mm"):
            dicom_series(str(tmp_path / "ct"), None)

    def test_two_slices_at_one_place(self, tmp_path):
        write_dicom(tmp_path / "ct", random_array("uint8", (3, 4, 4)), (0, 1, 1))
        with pytest.raises(VolumeError, match="two slices of .* are at one place"):
            dicom_series(str(tmp_path / "ct"), None)

    def test_a_slice_that_was_cut_off_anywhere_is_not_left_out(self, tmp_path):
        write_dicom(tmp_path / "ct", random_array("uint16", (4, 4, 4)))
        last = max((tmp_path / "ct").iterdir(), key=z_of_dicom)
        whole = last.read_bytes()
        pixels = whole.index(b"\xe0\x7f\x10\x00")
        for length in (0, 1, 131, 132, *range(133, pixels, 7), pixels, len(whole) - 1):
            last.write_bytes(whole[:length])
            with pytest.raises(VolumeError, match=re.escape(last.name)):
                dicom_series(str(tmp_path / "ct"), None)
        last.rename(last.with_suffix(""))
        last.with_suffix("").write_bytes(b"no DICOM, and of another kind by its name")
        assert dicom_series(str(tmp_path / "ct"), None).info.bounds.shape == (3, 4, 4)

    def test_an_empty_file_among_slices_without_suffix(self, tmp_path):
        write_dicom(tmp_path / "ct", random_array("uint16", (4, 4, 4)))
        for number, path in enumerate(sorted((tmp_path / "ct").iterdir())):
            path.rename(path.with_name(f"IM{number}"))
        (tmp_path / "ct/IM0").write_bytes(b"")
        with pytest.raises(VolumeError, match="IM0 has the name of a DICOM file"):
            dicom_series(str(tmp_path / "ct"), None)

    def test_files_beside_the_pictures_are_left_out(self, tmp_path):
        import pydicom

        write_dicom(tmp_path / "ct", random_array("uint16", (3, 4, 4)))
        report = pydicom.dcmread(next((tmp_path / "ct").iterdir()))
        for name in ("Rows", "Columns", "PixelData"):
            delattr(report, name)
        report.SOPClassUID = pydicom.uid.BasicTextSRStorage
        report.save_as(tmp_path / "ct/report.dcm")
        (tmp_path / "ct/.DS_Store").write_bytes(b"")
        (tmp_path / "ct/notes.txt").write_bytes(b"")
        assert dicom_series(str(tmp_path / "ct"), None).info.bounds.shape == (3, 4, 4)

    def test_files_that_change_are_noticed(self, tmp_path):
        from beam_inference.errors import WorkerFault

        write_dicom(tmp_path / "ct", random_array("uint8", (3, 4, 4)))
        source = dicom_series(str(tmp_path / "ct"), None)
        next((tmp_path / "ct").iterdir()).write_bytes(b"other")
        with pytest.raises(WorkerFault, match="not those of the launch"):
            source.open()


def z_of_dicom(path):
    import pydicom

    return float(pydicom.dcmread(path).ImagePositionPatient[2])


@pytest.fixture
def slide(tmp_path):
    """A slide of three scales, and a thumbnail."""
    y, x = np.mgrid[0:300, 0:500]
    array = np.stack([y % 256, x % 256, (x + y) // 4], axis=-1).astype(np.uint8)
    return write_svs(tmp_path / "a.svs", array)


class TestSlides:
    def test_its_scales_are_read_as_tifffile_reads_them(self, slide):
        import tifffile

        with tifffile.TiffFile(slide) as tiff:
            levels = [level.asarray() for level in tiff.series[0].levels]
        for scale, level in enumerate(levels):
            source = source_of(slide, scale=scale)
            assert_holds(source, np.moveaxis(level, -1, 0)[:, None])
            size = f"{500 * 500 / level.shape[1]:.6g}"
            assert any(f"--voxel-size Z,{size}" in note for note in source.info.notes), size

    def test_pictures_beside_it_are_chosen_by_number_or_name(self, slide):
        assert tiff_source(str(slide), "1").info.bounds.shape == (1, 38, 63)
        assert tiff_source(str(slide), "Thumbnail").info.bounds.shape == (1, 38, 63)

    def test_what_is_not_there(self, slide):
        with pytest.raises(ConfigError, match=r"--scale 3: .* has the scales 0 … 2"):
            tiff_source(str(slide), None, 3)
        with pytest.raises(VolumeError, match=r"holds 2 images: 0 \(Baseline, .*1 \(Thumbnail"):
            tiff_source(str(slide), "5")


@pytest.mark.parametrize(
    ("name", "module"),
    [("a.czi", "czifile"), ("a.lif", "liffile"), ("a.nd2", "nd2"), ("a.dcm", "pydicom")],
)
def test_a_library_that_is_not_installed(name, module, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'beam-inference\[instruments\]'"):
        source_of(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("a.mrxs", "OpenSlide"),
        ("a.oib", "pip install oiffile"),
        ("a.vsi", "bioformats2raw"),
        ("a.xlef", "OME-TIFF in LAS X"),
    ],
)
def test_kinds_that_are_not_read_name_the_way_out(name, way_out, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(VolumeError, match=f"What helps: .*{way_out}"):
        source_of(tmp_path / name)
