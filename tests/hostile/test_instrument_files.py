"""Files of instruments that would be read as a volume with wrong voxels, or in wrong places."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from instrument_files import LIBCZI, write_dicom, write_ims

from beam_inference.conversion.czi import describe_czi
from beam_inference.conversion.dicom import dicom_series
from beam_inference.conversion.ims import ims_source
from beam_inference.errors import PermanentReadError, VolumeError

pydicom = pytest.importorskip("pydicom")

ARRAY = np.arange(4 * 5 * 6, dtype=np.uint16).reshape(4, 5, 6)
CHANNEL = "DataSet/ResolutionLevel 0/TimePoint 0/Channel {}"


def series(folder: Path, change: Callable[[int, pydicom.Dataset], None]) -> Path:
    """A series of four slices, each changed by its place along z."""
    for path in write_dicom(folder, ARRAY).iterdir():
        data = pydicom.dcmread(path)
        change(round(data.ImagePositionPatient[2] / 2), data)
        data.save_as(path)
    return folder


def one_file(folder: Path, change: Callable[[int, pydicom.Dataset], None], frames: int = 4) -> Path:
    """A file of four frames, 2 mm apart, whose own descriptions are changed by their number."""
    (first, *_) = write_dicom(folder, ARRAY[:1]).iterdir()
    data = pydicom.dcmread(first)
    for key in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing"):
        delattr(data, key)
    data.NumberOfFrames = frames
    data.PixelData = ARRAY.tobytes()
    data.PerFrameFunctionalGroupsSequence = []
    for number in range(4):
        position, measures, plane, values, group = (pydicom.Dataset() for _ in range(5))
        position.ImagePositionPatient = [0, 0, 2 * number]
        measures.PixelSpacing = [0.5, 0.5]
        measures.SliceThickness = 2
        plane.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        values.RescaleSlope = 1
        values.RescaleIntercept = 0
        group.PlanePositionSequence = [position]
        group.PixelMeasuresSequence = [measures]
        group.PlaneOrientationSequence = [plane]
        group.PixelValueTransformationSequence = [values]
        change(number, group)
        data.PerFrameFunctionalGroupsSequence.append(group)
    data.save_as(first)
    return first


def _space(number, group):
    group.PixelMeasuresSequence[0].PixelSpacing = [0.5 + number, 0.5]


def _turn(number, group):
    if number == 2:
        group.PlaneOrientationSequence[0].ImageOrientationPatient = [0, 1, 0, 0, 0, 1]


def _repeat(number, group):
    group.PlanePositionSequence[0].ImagePositionPatient = [0, 0, 2 * (number % 2)]


def _lose_position(number, data):
    if number == 2:
        del data.ImagePositionPatient


def _give_table(number, data):
    table = pydicom.Dataset()
    table.LUTDescriptor = [2, 0, 16]
    data.ModalityLUTSequence = [table]


class TestDicomSeries:
    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda n, data: setattr(data, "PixelSpacing", [0.5 + n, 0.5]), "differ in the spac"),
            (lambda n, data: setattr(data, "ImagePositionPatient", [9 * n, 0, 2 * n]), "shifted"),
            (
                lambda n, data: setattr(
                    data, "ImageOrientationPatient", [1, 0, 0, 0, 1, 0] if n else [0, 1, 0, 0, 0, 1]
                ),
                "turned against one another",
            ),
            (_lose_position, "1 of the 4 slices .* do not state their position"),
            (_give_table, "Modality LUT"),
            (
                lambda n, data: setattr(data, "FrameOfReferenceUID", f"1.2.{n // 2}"),
                "are in several frames of reference",
            ),
            (lambda n, data: setattr(data, "RescaleSlope", 0), "are no scale"),
            (lambda n, data: setattr(data, "RescaleIntercept", "1e300"), "are no scale"),
            (lambda n, data: setattr(data, "PixelSpacing", [float("nan"), 1]), "is damaged"),
        ],
    )
    def test_what_makes_no_volume_is_refused(self, change, complaint, tmp_path):
        with pytest.raises(VolumeError, match=complaint):
            dicom_series(str(series(tmp_path / "ct", change)), None)

    def test_rounded_directions_are_the_same(self, tmp_path):
        def round_off(n, data):
            data.ImageOrientationPatient = [1, 0, 1e-6 * n, 0, 1, 0]

        source = dicom_series(str(series(tmp_path / "ct", round_off)), None)
        np.testing.assert_array_equal(source.open()(source.info.bounds)[0], ARRAY)

    @pytest.mark.parametrize(
        ("meaning", "note"),
        [("PALETTE COLOR", "table of colours is not kept"), ("MONOCHROME1", "the brighter the")],
    )
    def test_what_values_mean_is_told(self, meaning, note, tmp_path):
        folder = series(
            tmp_path / "ct", lambda n, data: setattr(data, "PhotometricInterpretation", meaning)
        )
        assert note in " ".join(dicom_series(str(folder), None).info.notes)


class TestDicomFrames:
    def test_frames_lie_where_they_say(self, tmp_path):
        heights = [15, 0, 10, 5]

        def move(number, group):
            group.PlanePositionSequence[0].ImagePositionPatient = [0, 0, heights[number]]

        source = dicom_series(str(one_file(tmp_path / "ct", move)), None)
        assert source.info.voxel_size_nm == (5e6, 5e5, 5e5)
        found = source.open()(source.info.bounds)[0]
        np.testing.assert_array_equal(found, ARRAY[np.argsort(heights)])

    def test_each_frame_has_its_own_scale(self, tmp_path):
        def scale(number, group):
            group.PixelValueTransformationSequence[0].RescaleSlope = number + 1

        source = dicom_series(str(one_file(tmp_path / "ct", scale)), None)
        expected = ARRAY * np.arange(1, 5, dtype=np.float32)[:, np.newaxis, np.newaxis]
        np.testing.assert_array_equal(source.open()(source.info.bounds)[0], expected)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (_space, "differ in the spacing"),
            (_turn, "turned against one another"),
            (_repeat, "at one place"),
        ],
    )
    def test_what_makes_no_volume_is_refused(self, change, complaint, tmp_path):
        with pytest.raises(VolumeError, match=complaint):
            dicom_series(str(one_file(tmp_path / "ct", change)), None)

    @pytest.mark.parametrize(
        ("vectors", "complaint"),
        [
            ({"EnergyWindowVector": [1, 1, 2, 2], "SliceVector": [1, 2, 1, 2]}, "EnergyWindowVect"),
            ({"TimeSlotVector": [1, 2, 3, 4]}, "several places along TimeSlotVector"),
            ({"SliceVector": [4, 3, 2, 1]}, "numbers its frames otherwise"),
        ],
    )
    def test_frames_of_nuclear_medicine_that_are_no_volume(self, vectors, complaint, tmp_path):
        path = one_file(tmp_path / "a", lambda number, group: None)
        data = pydicom.dcmread(path)
        data.SliceVector = [1, 2, 3, 4]
        data.DetectorVector = [1, 1, 1, 1]
        data.save_as(path)
        assert dicom_series(str(path), None).info.bounds.shape[0] == 4
        for key, values in vectors.items():
            setattr(data, key, values)
        data.save_as(path)
        with pytest.raises(VolumeError, match=complaint):
            dicom_series(str(path), None)

    @pytest.mark.parametrize("gap", [3.0, -3.0])
    @pytest.mark.parametrize("is_of_detector", [False, True])
    def test_frames_of_nuclear_medicine_lie_as_they_are_stacked(
        self, gap, is_of_detector, tmp_path
    ):
        """Only the first frame's place is stated, and the sign of the gap says where others lie."""
        path = one_file(tmp_path / "a", lambda number, group: None)
        data = pydicom.dcmread(path)
        del data.PerFrameFunctionalGroupsSequence
        data.PixelSpacing = [2, 1]
        data.SpacingBetweenSlices = gap
        data.SliceVector = [1, 2, 3, 4]
        place = pydicom.Dataset() if is_of_detector else data
        place.ImagePositionPatient = [-10, 20, -30]
        place.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        if is_of_detector:
            data.DetectorInformationSequence = [place]
        data.save_as(path)
        source = dicom_series(str(path), None)
        assert source.info.voxel_size_nm == (3e6, 2e6, 1e6)
        assert source.info.bounds.start == ((-10, 10, -10) if gap > 0 else (-13, 10, -10))
        found = source.open()(source.info.bounds)[0]
        np.testing.assert_array_equal(found, ARRAY if gap > 0 else ARRAY[::-1])

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            (lambda runs: runs[:70], "cannot read .*doesn't match the expected amount"),
            (lambda runs: runs + bytes([0x81, 7]), "padding - 31 vs. 30 bytes expected"),
        ],
    )
    def test_damaged_runs_are_told_in_one_message(self, fault, message, tmp_path, caplog, capfd):
        path = one_file(tmp_path / "a", lambda number, group: None)
        data = pydicom.dcmread(path)
        data.compress(pydicom.uid.RLELossless)
        frames = list(pydicom.encaps.generate_frames(data.PixelData, number_of_frames=4))
        frames[2] = fault(frames[2])
        data.PixelData = pydicom.encaps.encapsulate(frames)
        data.save_as(path)
        source = dicom_series(str(path), None)
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(PermanentReadError, match=message),
        ):
            source.open()(source.info.bounds)
        assert "Traceback" not in caplog.text + capfd.readouterr().err

    def test_several_segments_are_refused(self, tmp_path):
        def segment(number, group, others=2):
            group.SegmentIdentificationSequence = [pydicom.Dataset()]
            group.SegmentIdentificationSequence[0].ReferencedSegmentNumber = 1 + number // others

        with pytest.raises(VolumeError, match="holds 2 segments, each in frames of its own"):
            dicom_series(str(one_file(tmp_path / "a", segment)), None)
        one = one_file(tmp_path / "b", lambda number, group: segment(number, group, 4))
        assert dicom_series(str(one), None).info.bounds.shape[0] == 4

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_floats_are_refused_as_such(self, dtype, tmp_path):
        path = one_file(tmp_path / "a", lambda number, group: None)
        data = pydicom.dcmread(path)
        key = {"float32": "FloatPixelData", "float64": "DoubleFloatPixelData"}[dtype]
        del data.PixelData
        setattr(data, key, ARRAY.astype(dtype).tobytes())
        data.BitsAllocated = np.dtype(dtype).itemsize * 8
        del data.BitsStored, data.HighBit, data.PixelRepresentation
        data.save_as(path)
        with pytest.raises(VolumeError, match="holds floats .a parametric map., which are not"):
            dicom_series(str(path), None)

    @pytest.mark.parametrize("frames", [3, 10**9])
    def test_another_number_of_frames_than_described(self, frames, tmp_path):
        path = one_file(tmp_path / "ct", lambda number, group: None, frames)
        with pytest.raises(VolumeError, match=f"states {frames} frames, and describes 4"):
            dicom_series(str(path), None)


def _label(file):
    data = file[CHANNEL.format(0) + "/Data"]
    for dim, label in zip(data.dims, "xyz", strict=True):
        dim.label = label


def _offset(file):
    attributes = file[CHANNEL.format(0) + "/Data"].attrs
    attributes["resolution"] = [300.0, 100.0, 100.0]
    attributes["offset"] = [600.0, 200.0, 200.0]


def _stack(file):
    group = file[CHANNEL.format(0)]
    array = group["Data"][...]
    del group["Data"]
    group["Data"] = np.stack([array, array])


def _shrink(file):
    file[CHANNEL.format(1)].attrs["ImageSizeX"] = np.frombuffer(b"3", "S1")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_label, "not of z, y, x from 0"),
        (_offset, "not of z, y, x from 0"),
        (_stack, "not of z, y, x from 0"),
        (_shrink, "several sizes of its channels"),
        (
            lambda file: file.move(CHANNEL.format(1), CHANNEL.format(2)),
            "Channel 2, and no Channel 1: it is damaged",
        ),
    ],
)
def test_imaris_files_that_state_other_places(change, complaint, tmp_path):
    path = write_ims(tmp_path / "a.ims", np.stack([ARRAY, ARRAY])[np.newaxis], scales=1)
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(VolumeError, match=complaint):
        ims_source(str(path), None, 0)


def listed_tiles(path: Path, axis: str, change: Callable[[int, int], tuple[int, int]]) -> str:
    """A file of Zeiss's library whose list of tiles says otherwise where they begin and end."""
    czifile = pytest.importorskip("czifile")
    with czifile.CziFile(str(LIBCZI), multifile=False, detectmosaic=False) as czi:
        place = czi.header.directory_position
    data = bytearray(LIBCZI.read_bytes())
    while (place := data.find(axis.encode() + bytes(3), place)) >= 0:
        start, size = change(*struct.unpack_from("<ii", data, place + 4))
        struct.pack_into("<iifi", data, place + 4, start, size, 0.0, size)
        place += 4
    path.write_bytes(data)
    return str(path)


class TestCziTiles:
    @pytest.mark.parametrize(
        ("axis", "change"),
        [("Z", lambda start, size: (start, 2)), ("C", lambda start, size: (start - 1, size))],
    )
    def test_tiles_of_several_planes_are_refused(self, axis, change, tmp_path):
        path = listed_tiles(tmp_path / "a.czi", axis, change)
        with pytest.raises(VolumeError, match="several planes, or of a channel below 0"):
            describe_czi(path, None)

    @pytest.mark.parametrize(
        ("move", "notes"),
        [
            (50, ("6 of its 6 planes, down to 57.1 %", "24 y × 40 x and ", "24 y × 70 x")),
            (20, ()),
            (10, ("24 y × 40 x and ", "24 y × 30 x: the tiles' are taken")),
        ],
    )
    def test_what_no_tile_covers_is_told(self, move, notes, tmp_path):
        path = listed_tiles(tmp_path / "a.czi", "X", lambda a, n: (move if a else 0, n))
        found = describe_czi(path, None).info.notes
        assert all(note in " ".join(found) for note in notes)
        assert len(found) == {50: 2, 20: 0, 10: 1}[move]

    def test_tiles_of_no_time_beside_those_of_times_are_refused(self, tmp_path):
        path = listed_tiles(tmp_path / "a.czi", "Z", lambda z, n: (z, n))
        data = bytearray(Path(path).read_bytes())
        place = data.rfind(b"T\0\0\0")
        data[place : place + 8] = b"T\0\0\0\1\0\0\0"
        place = data.rfind(b"T\0\0\0", 0, place)
        data[place : place + 4] = b"H\0\0\0"
        Path(path).write_bytes(data)
        with pytest.raises(VolumeError, match="tiles that state no position along T"):
            describe_czi(path, None)

    def test_two_tiles_at_one_place_are_refused(self, tmp_path):
        path = listed_tiles(tmp_path / "a.czi", "X", lambda _, n: (0, n))
        data = Path(path).read_bytes()
        Path(path).write_bytes(data.replace(b"M\0\0\0\1\0\0\0", b"M\0\0\0\0\0\0\0"))
        with pytest.raises(
            VolumeError, match=r"lists 2 tiles at one place \(C \d, M 0, S 0, T 0, X 0"
        ):
            describe_czi(path, None)

    @pytest.mark.parametrize("number", [12, 13])
    def test_pixels_that_programs_read_as_different_numbers_are_refused(self, number, tmp_path):
        path = tmp_path / "a.czi"
        path.write_bytes(
            LIBCZI.read_bytes().replace(b"DV\1\0\0\0", b"DV" + bytes([number, 0, 0, 0]))
        )
        with pytest.raises(VolumeError, match=rf"of the type Gray\d\d \({number}\), which"):
            describe_czi(str(path), None)
