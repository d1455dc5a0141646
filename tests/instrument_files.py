"""Files as microscopes write them, byte by byte, after what is published of their formats.

No library writes LIF and ND2. What is here are the least files that their readers take; real ones
hold much more. The CZI file among the tests was written by Zeiss's own library.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

LIBCZI = Path(__file__).parent / "conversion" / "files" / "libczi.czi"
"""Two channels of three planes of 24 × 40 voxels, each of two tiles, packed with Zstandard."""


def libczi_voxels() -> np.ndarray:
    """The voxels of :data:`LIBCZI`: (channels, z, y, x)."""
    c, z, y, x = np.mgrid[0:2, 0:3, 0:24, 0:40]
    voxels: np.ndarray = (1000 * c + 100 * z + 3 * y + x).astype(np.uint16)
    return voxels


def lif_bytes(
    images: dict[str, np.ndarray],
    size_nm: Sequence[float] = (300, 100, 100),
    *,
    unit: str = "m",
    unit_nm: float = 1e9,
    head: str = "",
) -> bytes:
    """A LIF file of images (t, channels, z, y, x), by their names; size is in the order z, y, x."""
    elements = []
    blocks = b""
    for number, (name, array) in enumerate(images.items()):
        times, channels, *zyx = array.shape
        itemsize = array.dtype.itemsize
        strides = {
            "X": itemsize,
            "Y": itemsize * zyx[2],
            "Z": itemsize * zyx[2] * zyx[1],
            "C": itemsize * zyx[2] * zyx[1] * zyx[0],
        }
        strides["T"] = strides["C"] * channels
        lengths = [(n - 1) * size / unit_nm for n, size in zip(zyx, size_nm, strict=True)]
        dimensions = "".join(
            f'<DimensionDescription DimID="{identifier}" NumberOfElements="{n}" Origin="0" '
            f'Length="{length!r}" Unit="{unit}" BytesInc="{strides[axis]}" BitInc="0"/>'
            for axis, identifier, n, length in (
                ("X", 1, zyx[2], lengths[2]),
                ("Y", 2, zyx[1], lengths[1]),
                ("Z", 3, zyx[0], lengths[0]),
                ("T", 4, times, 1.0),
            )
            if n > 1 or axis in "XY"
        )
        described = "".join(
            f'<ChannelDescription DataType="{int(array.dtype.kind == "f")}" ChannelTag="0" '
            f'Resolution="{8 * itemsize}" NameOfMeasuredQuantity="" Min="0" Max="1" Unit="" '
            f'LUTName="Gray" IsLUTInverted="0" BytesInc="{channel * strides["C"]}" BitInc="0"/>'
            for channel in range(channels)
        )
        elements.append(
            f'<Element Name="{name}" UniqueID="{number}"><Data><Image><ImageDescription>'
            f"<Channels>{described}</Channels><Dimensions>{dimensions}</Dimensions>"
            f'</ImageDescription></Image></Data><Memory Size="{array.nbytes}" '
            f'MemoryBlockID="MemBlock_{number}"/></Element>'
        )
        identifier = f"MemBlock_{number}".encode("utf-16-le")
        blocks += struct.pack(
            "<IIBQBI", 0x70, len(identifier), 0x2A, array.nbytes, 0x2A, len(identifier) // 2
        )
        blocks += identifier + array.tobytes()
    xml = (
        f'<LMSDataContainerHeader Version="2"><Element Name="project">{head}<Children>'
        f"{''.join(elements)}</Children></Element></LMSDataContainerHeader>"
    )
    text = xml.encode("utf-16-le")
    return struct.pack("<IIBI", 0x70, 5 + len(text), 0x2A, len(text) // 2) + text + blocks


def nd2_bytes(
    array: np.ndarray,
    size_um: Sequence[float] = (0.3, 0.1, 0.1),
    *,
    packed: bool = False,
    row_bytes: int | None = None,
    height: int | None = None,
    depth: int | None = None,
    is_calibrated: bool = True,
    loops_over_one_time: bool = False,
    **stated: int,
) -> bytes:
    """An ND2 file of frames (t, z, channels, y, x), in loops over time and z.

    There is a loop over one time only where that is asked for. Its rows, its height, its depth and
    any attribute may be stated to be others than they are.
    """
    times, planes_stored, channels, rows, width = array.shape
    itemsize = array.dtype.itemsize
    depth = planes_stored if depth is None else depth
    attributes = {
        "uiWidth": width,
        "uiWidthBytes": row_bytes or width * channels * itemsize,
        "uiHeight": rows if height is None else height,
        "uiComp": channels,
        "uiBpcInMemory": 8 * itemsize,
        "uiBpcSignificant": 8 * itemsize,
        "uiSequenceCount": times * planes_stored,
        "eCompression": 0 if packed else 2,
        "dCompressionParam": 0.0,
        **stated,
    }
    z_loop = {
        "eType": 4,
        "uLoopPars": {"uiCount": depth, "dZLow": 0.0, "dZHigh": 1.0, "dZStep": size_um[0]},
    }
    times_loop = {
        "eType": 1,
        "uLoopPars": {"uiCount": times, "dStart": 0.0, "dPeriod": 1.0, "dDuration": 1.0},
        "ppNextLevelEx": {"": z_loop},
    }
    has_times = times > 1 or loops_over_one_time
    probe = {"m_sName": "dye"}
    planes = {
        "uiCount": channels,
        "uiCompCount": channels,
        "sPlaneNew": {
            f"a{n}": {"uiCompCount": 1, "sDescription": f"c{n}", "pFluorescentProbe": probe}
            for n in range(channels)
        },
    }
    metadata = {
        "dCalibration": size_um[2],
        "bCalibrated": is_calibrated,
        "dAspect": size_um[1] / size_um[2],
        "sPicturePlanes": planes,
    }
    chunks = {
        "ImageAttributesLV!": _clx({"SLxImageAttributes": attributes}),
        "ImageMetadataLV!": _clx({"SLxExperiment": times_loop if has_times else z_loop}),
        "ImageMetadataSeqLV|0!": _clx({"SLxPictureMetadata": metadata}),
    }
    for number, frame in enumerate(array.reshape(-1, channels, rows, width)):
        data = np.ascontiguousarray(np.moveaxis(frame, 0, -1)).tobytes()
        chunks[f"ImageDataSeq|{number}!"] = bytes(8) + (zlib.compress(data) if packed else data)
    out = struct.pack("<IIQ", 0x0ABECEDA, 32, 64)
    out += b"ND2 FILE SIGNATURE CHUNK NAME01!" + b"Ver3.0".ljust(64, b"\0")
    places = b""
    for name, data in chunks.items():
        places += name.encode() + struct.pack("<QQ", len(out), len(data))
        out += struct.pack("<IIQ", 0x0ABECEDA, 4072, len(data)) + name.encode().ljust(4072, b"\0")
        out += data
    start = len(out)
    end = b"ND2 CHUNK MAP SIGNATURE 0000001!" + struct.pack("<Q", start)
    places += end
    map_name = b"ND2 FILEMAP SIGNATURE NAME 0001!"
    out += struct.pack("<IIQ", 0x0ABECEDA, len(map_name), len(places)) + map_name + places
    return out


def _clx(values: dict[str, object]) -> bytes:
    """Values in ND2's binary form: a type, a name and what follows, level in level."""
    out = b""
    for name, value in values.items():
        text = f"{name}\0".encode("utf-16-le")
        if isinstance(value, dict):
            inner = _clx(value)
            head = 2 + len(text) + 12
            out += struct.pack("<BB", 11, len(text) // 2) + text
            out += struct.pack("<IQ", len(value), head + len(inner)) + inner + bytes(8 * len(value))
            continue
        kind, packed = (
            (1, struct.pack("<B", value))
            if isinstance(value, bool)
            else (3, struct.pack("<I", value))
            if isinstance(value, int)
            else (6, struct.pack("<d", value))
            if isinstance(value, float)
            else (8, f"{value}\0".encode("utf-16-le"))
        )
        out += struct.pack("<BB", kind, len(text) // 2) + text + packed
    return out


def write_ims(
    path: Path,
    array: np.ndarray,
    size: Sequence[float] = (0.3, 0.1, 0.1),
    scales: int = 2,
    *,
    unit: str = "um",
) -> Path:
    """Write an IMS file of an array (t, channels, z, y, x); size is in the order z, y, x."""
    with h5py.File(path, "w") as file:
        for scale in range(scales):
            coarse = array[..., :: 2**scale, :: 2**scale]
            for time, channels in enumerate(coarse):
                for number, channel in enumerate(channels):
                    group = file.create_group(
                        f"DataSet/ResolutionLevel {scale}/TimePoint {time}/Channel {number}"
                    )
                    padding = [(0, -n % 8) for n in channel.shape]
                    group.create_dataset(
                        "Data",
                        data=np.pad(channel, padding),
                        chunks=tuple(
                            min(8, n + p[1]) for n, p in zip(channel.shape, padding, strict=True)
                        ),
                        compression="gzip",
                    )
                    for axis, n in zip("ZYX", channel.shape, strict=True):
                        group.attrs[f"ImageSize{axis}"] = _letters(n)
        info = file.create_group("DataSetInfo/Image")
        info.attrs["Unit"] = np.frombuffer(unit.encode(), "S1")
        for k, (n, step) in enumerate(zip(array.shape[:1:-1], reversed(size), strict=True)):
            info.attrs[f"ExtMin{k}"] = _letters("0")
            info.attrs[f"ExtMax{k}"] = _letters(f"{n * step:.9g}")
    return path


def _letters(value: object) -> np.ndarray:
    return np.frombuffer(str(value).encode(), "S1")


def write_dicom(
    folder: Path,
    array: np.ndarray,
    spacing_mm: Sequence[float] = (2.0, 0.5, 0.5),
    origin_mm: Sequence[float] = (0.0, 0.0, 0.0),
    *,
    series: int = 1,
    intercept: float | None = None,
    **further: Any,
) -> Path:
    """Write a series of slices (z, y, x) by pydicom, in an order that is not that of their names.

    Further elements are given by their names; those of the array may be replaced.

    Spacing and origin are in the order z, y, x.
    """
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    folder.mkdir(exist_ok=True)
    uid = generate_uid(entropy_srcs=[f"series {series}"])
    for z, plane in enumerate(array):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[f"{series} {z}"])
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        path = folder / f"{series}_{(7 * z + 3) % 101:03d}.dcm"
        data = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
        data.SOPClassUID = meta.MediaStorageSOPClassUID
        data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
        data.Modality = "CT"
        data.SeriesInstanceUID = uid
        data.SeriesNumber = series
        data.SeriesDescription = f"series {series}"
        data.InstanceNumber = len(array) - z
        data.ImagePositionPatient = [origin_mm[2], origin_mm[1], origin_mm[0] + z * spacing_mm[0]]
        data.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        data.PixelSpacing = [spacing_mm[1], spacing_mm[2]]
        data.SliceThickness = spacing_mm[0]
        data.Rows, data.Columns = plane.shape
        data.SamplesPerPixel = 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.BitsAllocated = data.BitsStored = 8 * plane.dtype.itemsize
        data.HighBit = data.BitsStored - 1
        data.PixelRepresentation = int(plane.dtype.kind == "i")
        if intercept is not None:
            data.RescaleSlope = 1
            data.RescaleIntercept = intercept
        data.PixelData = plane.tobytes()
        for name, value in further.items():
            setattr(data, name, value)
        data.save_as(path, enforce_file_format=True)
    return folder


def write_svs(path: Path, array: np.ndarray, scales: int = 3) -> Path:
    """Write a slide (y, x, 3) as Aperio's scanners do: tiles of coarser scales, and a thumbnail."""
    import tifffile

    with tifffile.TiffWriter(path) as tiff:
        text = "Aperio Image Library v1\n{} x {} -> |AppMag = 20|MPP = 0.5"
        for scale in range(scales):
            coarse = np.ascontiguousarray(array[:: 4**scale, :: 4**scale])
            tiff.write(
                coarse,
                tile=(64, 64),
                photometric="rgb",
                compression="jpeg",
                compressionargs={"level": 100},
                description=text.format(*coarse.shape[1::-1]),
                metadata=None,
            )
            if scale == 0:
                thumbnail = np.ascontiguousarray(array[::8, ::8])
                tiff.write(thumbnail, photometric="rgb", metadata=None, description=text)
    return path
