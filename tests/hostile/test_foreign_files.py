"""Files that were cut off, damaged or made to do harm, as sources of ``convert``.

The numbers in the ids are those of the list of hostile cases.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
from foreign_files import mrc_bytes, nifti_bytes, nrrd_bytes, tiff_bytes
from PIL import Image
from source_volumes import random_array

from beam_inference.cli.main import main
from beam_inference.conversion.convert import plan_conversion
from beam_inference.conversion.options import ConversionOptions
from beam_inference.conversion.process_apart import run_apart
from beam_inference.errors import UserError, VolumeError

ARRAY = random_array("uint8", (5, 6, 7))
CUBE_OF_A_MILLION = "1000000 1000000 1000000"
BOMB_BYTES = 48 * 2**20
"""Bytes that bombs unpack to, after a header that speaks of a few hundred."""


def convert(source: Path | str, target: Path, *words: str) -> int:
    return main(["convert", str(source), str(target), "--drop=voxel-size,offset", *words])


def check_refused(source: Path | str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Check that a source ends in one message, and leaves nothing; returns the message."""
    (folder / "target").mkdir()
    dataset = ":v" if str(source).endswith(".h5") and folder in Path(source).parents else ""
    assert convert(f"{source}{dataset}", folder / "target" / "out.npy") in (1, 2)
    message = capsys.readouterr().err
    assert "error: " in message
    assert "Traceback" not in message
    assert "not foreseen" not in message
    assert not list((folder / "target").iterdir())
    return message


def check_converted(source: Path | str, folder: Path, array: np.ndarray | None = ARRAY) -> None:
    target = folder / "out.npy"
    assert convert(source, target) == 0
    if array is not None:
        np.testing.assert_array_equal(np.load(target), array)


def patched(content: bytes, **patches: Any) -> bytes:
    """A file with other bytes at some positions, given as ``at_70=bytes``."""
    changed = bytearray(content)
    for name, value in patches.items():
        position = int(name.removeprefix("at_"))
        changed[position : position + len(value)] = value
    return bytes(changed)


def nrrd(
    *lines: str, sizes: str = "7 6 5", packing: str = "raw", data: bytes | None = None
) -> bytes:
    head = ["NRRD0004", "type: uint8", f"dimension: {len(sizes.split())}", f"sizes: {sizes}"]
    text = "\n".join([*head, f"encoding: {packing}", *lines]) + "\n\n"
    return text.encode() + (ARRAY.tobytes() if data is None else data)


def nhdr(name: str) -> bytes:
    return nrrd(f"data file: {name}", data=b"")


NRRD_REFUSED = {
    "52 truncated": nrrd()[:-5],
    "54 sizes of a million": nrrd(sizes=CUBE_OF_A_MILLION),
    "56 negative sizes": nrrd(sizes="7 -6 5"),
    "58 size of zero": nrrd(sizes="7 0 5", data=b""),
    "72 compressed, of a million": nrrd(
        sizes=CUBE_OF_A_MILLION, packing="gzip", data=gzip.compress(bytes(1000))
    ),
    "75 byte skip of -7": nrrd("byte skip: -7"),
    "75 byte skip of -1, cut off": nrrd("byte skip: -1", data=b"1"),
    "77 byte skip of garbage": nrrd("byte skip: many"),
    "80 kinds too few": nrrd("kinds: domain domain"),
    "81 kinds of no positions": nrrd("kinds: list list list"),
    "of a million lines": nrrd(*(f"k{n}:=v" for n in range(10**6))),
    "no dimension": nrrd().replace(b"dimension: 3\n", b""),
    "another dimension than sizes": nrrd().replace(b"dimension: 3", b"dimension: 2"),
    "90 garbage": b"NRRD0004\n" + random_array("uint8", (1000,)).tobytes(),
    "90 one line without an end": b"NRRD0004\n" + b"a" * 2**20,
}


@pytest.mark.parametrize("case", NRRD_REFUSED)
def test_nrrd_headers_are_refused(case, tmp_path, capsys):
    (tmp_path / "a.nrrd").write_bytes(NRRD_REFUSED[case])
    check_refused(tmp_path / "a.nrrd", tmp_path, capsys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it ends before its header does"),
        (nrrd().replace(b"encoding: raw\n", b""), "'encoding' is missing, or not known"),
    ],
)
def test_nrrd_headers_that_lack_something(content, reason, tmp_path, capsys):
    (tmp_path / "a.nrrd").write_bytes(content)
    message = check_refused(tmp_path / "a.nrrd", tmp_path, capsys)
    assert f"a.nrrd is not an NRRD file: {reason}" in message


NRRD_READ = {
    "50 good": nrrd(),
    "83 directions of garbage": nrrd("space dimension: 3", "space directions: (a,b) none (1,2,3)"),
    "86 spacings of infinity": nrrd("spacings: inf inf nan", 'units: "nm" "nm" "nm"'),
    "88 origin at 1e300": nrrd(
        "space dimension: 3",
        'space units: "nm" "nm" "nm"',
        "space directions: (1,0,0) (0,1,0) (0,0,1)",
        "space origin: (1e300,1e300,-1e300)",
    ),
}


@pytest.mark.parametrize("case", NRRD_READ)
def test_nrrd_headers_are_read_or_refused(case, tmp_path, capsys):
    (tmp_path / "a.nrrd").write_bytes(NRRD_READ[case])
    if "garbage" in case:
        check_refused(tmp_path / "a.nrrd", tmp_path, capsys)
    else:
        check_converted(tmp_path / "a.nrrd", tmp_path)


def test_an_origin_out_of_reach_is_told(tmp_path, capsys):  # 88
    (tmp_path / "a.nrrd").write_bytes(NRRD_READ["88 origin at 1e300"])
    check_converted(tmp_path / "a.nrrd", tmp_path)
    assert "out of reach" in capsys.readouterr().err


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that a header in ``tmp_path/in`` should not be able to reach."""
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.raw").write_bytes(ARRAY.tobytes())
    return tmp_path / "secret.raw"


@pytest.mark.parametrize("name", ["../secret.raw", "{}", "link.raw", "folder/secret.raw"])
def test_nrrd_data_files_lie_in_their_folder(name, secret, tmp_path, capsys):  # 93, 96
    (tmp_path / "in" / "link.raw").symlink_to(secret)
    (tmp_path / "in" / "folder").symlink_to(tmp_path)
    (tmp_path / "in" / "a.nhdr").write_bytes(nhdr(name.format(secret)))
    message = check_refused(tmp_path / "in" / "a.nhdr", tmp_path, capsys)
    assert "leads out of its folder" in message


@pytest.mark.parametrize("name", ["/etc/passwd", "/dev/zero", "/proc/self/environ"])
def test_nrrd_data_files_of_the_system(name, tmp_path, capsys):  # 96
    (tmp_path / "a.nhdr").write_bytes(nhdr(name))
    assert "leads out of its folder" in check_refused(tmp_path / "a.nhdr", tmp_path, capsys)


def test_nrrd_data_files_that_are_none(tmp_path, capsys):
    (tmp_path / "a.nhdr").write_bytes(nhdr("pipe"))
    os.mkfifo(tmp_path / "pipe")
    assert "not one file beside it" in check_refused(tmp_path / "a.nhdr", tmp_path, capsys)


def test_nrrd_data_files_beside_their_header(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.raw").write_bytes(ARRAY.tobytes())
    (tmp_path / "a.nhdr").write_bytes(nhdr("data/a.raw"))
    check_converted(tmp_path / "a.nhdr", tmp_path)


def deflated(stated: bytes) -> bytes:
    return stated + bytes(BOMB_BYTES)


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "103 470 NRRD, gzip": (
        "a.nrrd",
        lambda: nrrd(packing="gzip", data=gzip.compress(bytes(BOMB_BYTES), 1)),
    ),
    "103 NRRD, bzip2": (
        "a.nrrd",
        lambda: nrrd(packing="bzip2", data=bz2.compress(bytes(BOMB_BYTES), 1)),
    ),
    "119 npz": ("a.npz", lambda: npz(("v.npy", npy() + bytes(BOMB_BYTES)))),
    "NIfTI, gzip": (
        "a.nii.gz",
        lambda: gzip.compress(nifti_bytes(ARRAY, (1, 1, 1)) + bytes(BOMB_BYTES), 1),
    ),
    "NIfTI, an extension of 1.5 GiB": (
        "a.nii.gz",
        lambda: gzip.compress(
            patched(
                nifti_bytes(ARRAY, (1, 1, 1)) + bytes(BOMB_BYTES),
                at_108=struct.pack("<f", 2.0**30),
                at_348=struct.pack("<4b2i", 1, 0, 0, 0, 3 * 2**29, 4),
            ),
            1,
        ),
    ),
    "MRC, gzip": (
        "a.mrc.gz",
        lambda: gzip.compress(mrc_bytes(ARRAY.view("int8"), (1, 1, 1)) + bytes(BOMB_BYTES), 1),
    ),
    "144 MRC, an extended header of 2 GiB": (
        "a.mrc.gz",
        lambda: gzip.compress(
            patched(
                mrc_bytes(ARRAY.view("int8"), (1, 1, 1)) + bytes(BOMB_BYTES),
                at_92=struct.pack("<i", 2**31 - 1),
            ),
            1,
        ),
    ),
}


@pytest.mark.parametrize("case", BOMBS)
def test_no_more_is_unpacked_than_a_header_speaks_of(case, tmp_path, capsys):
    name, make = BOMBS[case]
    (tmp_path / name).write_bytes(make())
    tracemalloc.start()
    try:
        message = check_refused(tmp_path / name, tmp_path, capsys)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20
    assert "header" in message


def npy(shape: str = "(5, 6, 7)", descr: str = "'|u1'", version: int = 1, pad: int = 0) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * pad + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + ARRAY.tobytes()


def npz(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def encrypted_npz() -> bytes:
    """An archive whose one member says that it is encrypted, in both places that say so."""
    content = bytearray(npz(("v.npy", npy())))
    directory = content.index(b"PK\1\2")
    content[6] |= 1
    content[directory + 8] |= 1
    return bytes(content)


NUMPY_REFUSED = {
    "106 a.npy truncated": npy()[:-3],
    "107 a.npy negative shape": npy("(5, -6, 7)"),
    "108 a.npy of 10^18": npy("(1000000, 1000000, 1000000)"),
    "108 a.npy of 10^300": npy(f"(5, 6, {10**300})"),
    "109 a.npy shape of zero": npy("(5, 0, 7)"),
    "110 a.npy pickled objects": npy(descr="'|O'"),
    "111 a.npy shape of floats": npy("(5.0, 6.0, 7.0)"),
    "112 a.npy version 3": npy(version=3),
    "113 a.npy header of 100 kB": npy(version=2, pad=100_000),
    "114 a.npy void": npy(descr="'|V1'"),
    "115 a.npy complex": npy(descr="'<c8'"),
    "116 a.npz two members without suffix": npz(("v", npy()), ("w", npy())),
    "117 a.npz garbage": random_array("uint8", (1000,)).tobytes(),
    "118 a.npz empty": npz(),
    "120 a.npz encrypted": encrypted_npz(),
    "120 a.npz compressed in an unknown way": npz(("v.npy", npy())).replace(b"\x08\0", b"\x63\0"),
}


@pytest.mark.parametrize("case", NUMPY_REFUSED)
def test_numpy_files_are_refused(case, tmp_path, capsys):
    path = tmp_path / case.split()[1]
    path.write_bytes(NUMPY_REFUSED[case])
    check_refused(path, tmp_path, capsys)


def test_members_of_an_archive_are_named_but_not_all(tmp_path, capsys):
    (tmp_path / "a.npz").write_bytes(npz(*((f"m{n}.npy", b"") for n in range(3000))))
    message = check_refused(tmp_path / "a.npz", tmp_path, capsys)
    assert "holds m0, m1, m2, m3, m4, m5, m6, m7, m8, m9: name one" in message


def test_numpy_files_are_read(tmp_path):  # 104, 105, 116
    (tmp_path / "a.npy").write_bytes(npy())
    check_converted(tmp_path / "a.npy", tmp_path)
    np.save(tmp_path / "f.npy", np.asfortranarray(ARRAY))
    assert convert(tmp_path / "f.npy", tmp_path / "out.npy", "--overwrite") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), ARRAY)
    (tmp_path / "a.npz").write_bytes(npz(("member", npy())))
    assert convert(tmp_path / "a.npz", tmp_path / "out.npy", "--overwrite") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), ARRAY)


NIFTI = nifti_bytes(ARRAY, (1, 1, 1))
NIFTI_REFUSED = {
    "122 extents of 32767": patched(NIFTI, at_42=struct.pack("<3h", 32767, 32767, 32767)),
    "124 negative extents": patched(NIFTI, at_42=struct.pack("<3h", 7, -6, 5)),
    "125 no axes": patched(NIFTI, at_40=struct.pack("<h", 0)),
    "126 a hundred axes": patched(NIFTI, at_40=struct.pack("<h", 100)),
    "127 array at NaN": patched(NIFTI, at_108=struct.pack("<f", np.nan)),
    "128 array at infinity": patched(NIFTI, at_108=struct.pack("<f", np.inf)),
    "129 array at -1000": patched(NIFTI, at_108=struct.pack("<f", -1000)),
    "129 array at 0": patched(NIFTI, at_108=struct.pack("<f", 0)),
    "130 datatype 9999": patched(NIFTI, at_70=struct.pack("<h", 9999)),
    "131 datatype RGB": patched(NIFTI, at_70=struct.pack("<2h", 128, 24)),
    "136 truncated header": NIFTI[:200],
    "136 empty": b"",
    "of a pair": patched(NIFTI, at_344=b"ni1\0"),
}


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("case", NIFTI_REFUSED)
def test_nifti_headers_are_refused(case, is_packed, tmp_path, capsys):  # 123: packed
    content = NIFTI_REFUSED[case]
    path = tmp_path / ("a.nii.gz" if is_packed else "a.nii")
    path.write_bytes(gzip.compress(content) if is_packed else content)
    check_refused(path, tmp_path, capsys)


def test_a_compressed_nifti_file_that_was_cut_off(tmp_path, capsys):  # 137
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(NIFTI)[:-20])
    check_refused(tmp_path / "a.nii.gz", tmp_path, capsys)


NIFTI_READ = {
    "121 good": NIFTI,
    "132 unknown units": patched(NIFTI, at_123=b"\x07"),
    "133 zooms of NaN": patched(NIFTI, at_80=struct.pack("<3f", np.nan, np.inf, -1)),
    "134 slope of NaN": patched(NIFTI, at_112=struct.pack("<f", np.nan)),
    "135 matrix of infinity": patched(NIFTI, at_280=struct.pack("<12f", *[np.inf] * 12)),
}


@pytest.mark.parametrize("case", NIFTI_READ)
def test_nifti_headers_whose_voxels_are_read(case, tmp_path):
    (tmp_path / "a.nii").write_bytes(NIFTI_READ[case])
    check_converted(tmp_path / "a.nii", tmp_path)


MRC = mrc_bytes(ARRAY, (1, 1, 1), imod=0)
MRC_REFUSED = {
    "139 extents of 2^31": patched(MRC, at_0=struct.pack("<3i", *[2**31 - 1] * 3)),
    "140 negative extents": patched(MRC, at_0=struct.pack("<3i", 7, -6, 5)),
    "141 mode 99": patched(MRC, at_12=struct.pack("<i", 99)),
    "142 mode complex": patched(MRC, at_12=struct.pack("<i", 4)),
    "143 negative extension": patched(MRC, at_92=struct.pack("<i", -1)),
    "144 huge extension": patched(MRC, at_92=struct.pack("<i", 2**31 - 1)),
    "147 truncated header": MRC[:500],
}


@pytest.mark.parametrize("case", MRC_REFUSED)
def test_mrc_headers_are_refused(case, tmp_path, capsys):
    (tmp_path / "a.mrc").write_bytes(MRC_REFUSED[case])
    check_refused(tmp_path / "a.mrc", tmp_path, capsys)


def test_compressed_garbage_as_mrc(tmp_path, capsys):  # 148
    (tmp_path / "a.mrc.gz").write_bytes(random_array("uint8", (2000,)).tobytes())
    check_refused(tmp_path / "a.mrc.gz", tmp_path, capsys)


MRC_READ = {
    "138 good": MRC,
    "145 cell of NaN": patched(MRC, at_40=struct.pack("<3f", np.nan, np.inf, 1)),
    "146 start far away": patched(MRC, at_16=struct.pack("<3i", *[2**31 - 1] * 3)),
}


@pytest.mark.parametrize("case", MRC_READ)
def test_mrc_headers_whose_voxels_are_read(case, tmp_path):
    (tmp_path / "a.mrc").write_bytes(MRC_READ[case])
    check_converted(tmp_path / "a.mrc", tmp_path)


def write_hdf5(path: Path, array: np.ndarray = ARRAY, name: str = "v", **keys: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=array, **keys)


def test_a_good_hdf5_file(tmp_path):  # 149
    write_hdf5(tmp_path / "a.h5")
    check_converted(tmp_path / "a.h5", tmp_path)


@pytest.mark.parametrize("damage", ["150 truncated", "151 corrupted header"])
def test_hdf5_files_are_refused(damage, tmp_path, capsys):
    write_hdf5(tmp_path / "a.h5")
    content = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "a.h5").write_bytes(
        content[:1000] if "truncated" in damage else patched(content, at_8=b"\xff" * 40)
    )
    check_refused(tmp_path / "a.h5", tmp_path, capsys)


@pytest.fixture
def links(tmp_path: Path) -> h5py.File:
    """The file ``in/a.h5``, open, beside ``out.h5`` with a volume, which is out of its folder."""
    (tmp_path / "in").mkdir()
    write_hdf5(tmp_path / "out.h5")
    write_hdf5(tmp_path / "in" / "near.h5", name="group/v")
    with h5py.File(tmp_path / "in" / "a.h5", "w") as file:
        yield file


@pytest.mark.parametrize("name", ["../out.h5", "{}/out.h5", "/etc/passwd"])
def test_external_links_lead_nowhere_else(name, links, tmp_path, capsys):  # 152, 153
    links["v"] = h5py.ExternalLink(name.format(tmp_path), "v")
    links.close()
    message = check_refused(tmp_path / "in" / "a.h5", tmp_path, capsys)
    assert "leads out of its folder" in message


def test_a_soft_link_to_an_external_one(links, tmp_path, capsys):  # 152
    links.create_group("g")["w"] = h5py.ExternalLink("../out.h5", "/")
    links["v"] = h5py.SoftLink("/g/w/v")
    links.close()
    message = check_refused(tmp_path / "in" / "a.h5", tmp_path, capsys)
    assert "leads out of its folder" in message


def test_links_in_a_circle(links, tmp_path, capsys):
    links["v"] = h5py.ExternalLink("a.h5", "w")
    links["w"] = h5py.SoftLink("/v")
    links.close()
    assert "more than 16 links" in check_refused(tmp_path / "in" / "a.h5", tmp_path, capsys)


def test_links_inside_the_folder_are_followed(links, tmp_path):
    links.create_group("g")["far"] = h5py.ExternalLink("near.h5", "/group")
    links["g/v"] = h5py.SoftLink("far/v")
    links.close()
    check_converted(f"{tmp_path}/in/a.h5:g/v", tmp_path)


def test_external_storage_is_refused(tmp_path, capsys):  # 154, 155
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("v", (5, 6, 7), "u1", external=[("/etc/passwd", 0, 210)])
    message = check_refused(tmp_path / "a.h5", tmp_path, capsys)
    assert "/etc/passwd, a file without a format" in message


@pytest.mark.parametrize("name", ["../out.h5", "{}/out.h5", "missing.h5"])
def test_virtual_datasets_of_other_places(name, links, tmp_path, capsys):
    layout = h5py.VirtualLayout(ARRAY.shape, "u1")
    layout[...] = h5py.VirtualSource(name.format(tmp_path), "v", ARRAY.shape)
    links.create_virtual_dataset("v", layout)
    links.close()
    message = check_refused(tmp_path / "in" / "a.h5", tmp_path, capsys)
    assert "names the file" in message


def test_virtual_datasets_of_the_folder(links, tmp_path):
    layout = h5py.VirtualLayout(ARRAY.shape, "u1")
    layout[...] = h5py.VirtualSource("near.h5", "group/v", ARRAY.shape)
    links.create_virtual_dataset("v", layout)
    links.close()
    check_converted(tmp_path / "in" / "a.h5", tmp_path)


def _virtual(file, name, source, dataset):
    layout = h5py.VirtualLayout(ARRAY.shape, "u1")
    layout[...] = h5py.VirtualSource(source, dataset, ARRAY.shape)
    file.create_virtual_dataset(name, layout)


@pytest.mark.parametrize("way", ["storage", "link", "virtual", "nothing"])
def test_virtual_datasets_of_their_own_file_lead_nowhere_else(way, links, tmp_path, capsys):
    outside = tmp_path / "out.h5"
    if way == "storage":
        links.create_dataset("inner", ARRAY.shape, "u1", external=[("/etc/passwd", 0, ARRAY.size)])
    elif way == "link":
        links["inner"] = h5py.ExternalLink(str(outside), "v")
    elif way == "virtual":
        _virtual(links, "inner", str(outside), "v")
    _virtual(links, "v", ".", "inner")
    links.close()
    check_refused(f"{tmp_path}/in/a.h5:v", tmp_path, capsys)


def test_virtual_datasets_of_their_own_file_are_read(links, tmp_path):
    links["inner"] = ARRAY
    _virtual(links, "v", ".", "inner")
    links.close()
    check_converted(f"{tmp_path}/in/a.h5:v", tmp_path)


def test_virtual_datasets_of_patterns_are_refused(links, tmp_path, capsys):
    plane = ARRAY.shape[1:]
    layout = h5py.VirtualLayout(ARRAY.shape, "u1", maxshape=(None, *plane))
    source = h5py.VirtualSource("near.h5", "d%b", (1, *plane))
    layout[0 : h5py.UNLIMITED] = source
    links.create_virtual_dataset("v", layout)
    links.close()
    assert "a pattern of names" in check_refused(f"{tmp_path}/in/a.h5:v", tmp_path, capsys)


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "GIF", "frames"])
def test_pictures_of_other_kinds_are_not_opened(kind, tmp_path, capsys, monkeypatch):
    """A name does not say what a file is: EPS would start another program."""
    from PIL import Image

    folder = tmp_path / "slices"
    folder.mkdir()
    picture = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for number in range(3):
        path = folder / f"s{number}.png"
        if kind == "EPS":
            path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n")
        elif kind == "frames":
            picture.save(path, save_all=True, append_images=[picture.rotate(90)])
        else:
            picture.save(path, format=kind)
    message = check_refused(f"{folder}/*.png", tmp_path, capsys)
    assert ("holds 2 pictures" if kind == "frames" else "cannot be read as a picture") in message


def test_a_sparse_dataset_of_10_to_the_18(tmp_path, capsys):  # 156, 157
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("v", (10**6,) * 3, "u1", chunks=(64, 64, 64))
    check_refused(tmp_path / "a.h5", tmp_path, capsys)


def test_a_place_that_is_no_number(tmp_path):  # 158
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("v", data=ARRAY)
        dataset.attrs["resolution"] = [np.nan, 8.0, 8.0]
        file.copy("v", "w")
        file["w"].attrs["resolution"] = [8.0, 8.0, 8.0]
        file["w"].attrs["offset"] = [np.inf, 0.0, np.nan]
    check_converted(f"{tmp_path}/a.h5:v", tmp_path)
    (tmp_path / "out.npy").unlink()
    check_converted(f"{tmp_path}/a.h5:w", tmp_path)


def test_a_chunk_of_1600_mib(tmp_path):  # 447
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("v", (1200,) * 3, "u1", chunks=(1200,) * 3)
    options = ConversionOptions(drop=("voxel-size",))
    plan = plan_conversion(f"{tmp_path}/a.h5", f"{tmp_path}/out.npy", options)
    assert plan.source.info.bounds.shape == (1200, 1200, 1200)


def test_a_good_tiff_file(tmp_path):  # 449
    (tmp_path / "a.tif").write_bytes(tiff_bytes(ARRAY))
    check_converted(tmp_path / "a.tif", tmp_path)


def test_tiff_files_are_refused(tmp_path, capsys):  # 159, 166
    content = tiff_bytes(ARRAY[:1], order="<")
    start = struct.unpack_from("<I", content, 4)[0]
    entries = struct.unpack_from("<H", content, start)[0]
    circle = patched(content, **{f"at_{start + 2 + 12 * entries}": struct.pack("<I", start)})
    for name, damaged in (("truncated", content[:-40]), ("circle", circle), ("head", content[:7])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.tif").write_bytes(damaged)
        check_refused(folder / "a.tif", folder, capsys)


@pytest.mark.parametrize("seed", range(12))  # 160 to 164, and more
def test_tiff_tags_of_random_bytes(seed, tmp_path, capsys):
    random = np.random.default_rng(seed)
    content = bytearray(tiff_bytes(ARRAY, order="<"))
    start = struct.unpack_from("<I", content, 4)[0]
    for _ in range(6):
        content[start + 2 + random.integers(0, 120)] = random.integers(0, 256)
    (tmp_path / "a.tif").write_bytes(content)
    code = convert(tmp_path / "a.tif", tmp_path / "out.npy")
    assert code in (0, 1, 2)
    assert "not foreseen" not in capsys.readouterr().err


def with_tag(content: bytes, page: int, tag: int, value: int) -> bytes:
    """A TIFF file with another value of a tag of one of its pages."""
    with tifffile.TiffFile(io.BytesIO(content)) as tiff:
        header = tiff.pages[page].tags[tag]
        packed = struct.pack(tiff.byteorder + {3: "H", 4: "I"}[header.dtype], value)
        return patched(content, **{f"at_{header.valueoffset}": packed})


SAMPLES_PER_PIXEL = 277
COMPRESSION = 259
PLANAR_CONFIGURATION = 284


def test_a_later_tiff_page_without_channels(tmp_path, capsys):
    content = with_tag(tiff_bytes(ARRAY, rows=2), 3, SAMPLES_PER_PIXEL, 0)
    (tmp_path / "a.tif").write_bytes(content)
    message = check_refused(tmp_path / "a.tif", tmp_path, capsys)
    assert "page 3 of" in message
    assert "is another kind of image than the first" in message


@pytest.mark.parametrize("options", [{}, {"compression": "deflate", "tile": (16, 16)}], ids=str)
@pytest.mark.parametrize(
    ("stored", "told", "message"),
    [
        ("separate", 3, "stored in the way 3; expected 1, together, or 2, one after the other"),
        ("contig", 3, "stored in the way 3"),
        ("separate", 1, "strips or tiles; expected"),
        ("contig", 2, "strips or tiles; expected"),
    ],
)
def test_a_tiff_that_says_wrongly_how_its_channels_lie(
    stored, told, message, options, tmp_path, capsys
):
    """Channels were zeros, or interleaved, with exit code 0."""
    shape = (3, 20, 24) if stored == "separate" else (20, 24, 3)
    image = np.random.default_rng(0).integers(1, 60000, shape, dtype=np.uint16)
    path = tmp_path / "a.tif"
    options |= {"photometric": "rgb", "planarconfig": stored, "metadata": None}
    tifffile.imwrite(path, image, **options)
    path.write_bytes(with_tag(path.read_bytes(), 0, PLANAR_CONFIGURATION, told))
    assert message in check_refused(path, tmp_path, capsys)


WIDTH = 256
LENGTH = 257
BITS_PER_SAMPLE = 258


@pytest.mark.parametrize("compression", [None, "deflate", "lzw", "packbits", "zstd"])
@pytest.mark.parametrize(
    ("dtype", "tag", "told"),
    [
        ("uint8", WIDTH, 15),
        ("uint8", LENGTH, 11),
        ("uint8", BITS_PER_SAMPLE, 4),
        ("uint16", BITS_PER_SAMPLE, 8),
        ("float32", BITS_PER_SAMPLE, 16),
    ],
)
def test_a_tiff_with_more_bytes_than_its_header_says(
    dtype, tag, told, compression, tmp_path, capsys
):
    """Slices were sheared, or low bytes taken for voxels, with exit code 0."""
    slices = np.random.default_rng(0).integers(1, 255, (2, 12, 16)).astype(dtype)
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        for each in slices:
            file.write(each, metadata=None, contiguous=False, compression=compression)
    for page in range(2):
        path.write_bytes(with_tag(path.read_bytes(), page, tag, told))
    check_refused(path, tmp_path, capsys)


@pytest.mark.parametrize("compression", [2, 3, 4])
def test_a_tiff_of_bytes_that_says_it_is_a_fax(compression, tmp_path, capsys):
    content = with_tag(tiff_bytes(ARRAY[:1], rows=2), 0, COMPRESSION, compression)
    (tmp_path / "a.tif").write_bytes(content)
    message = check_refused(tmp_path / "a.tif", tmp_path, capsys)
    assert "8 bits each, in a compression of single bits" in message


def test_slices_of_a_tiff_compression_that_nobody_knows(tmp_path, capsys):
    content = with_tag(tiff_bytes(ARRAY[:1], rows=2), 0, COMPRESSION, 60000)
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.tif").write_bytes(content)
    message = check_refused(tmp_path / "in", tmp_path, capsys)
    assert "a TIFF with 60000 compression" in message


def test_a_tiff_strip_larger_than_memory(tmp_path, capsys):
    content = with_tag(tiff_bytes(ARRAY[:1], rows=2), 0, COMPRESSION, 8)
    for tag in (256, 257, 278):  # width, length, and rows of a strip
        content = with_tag(content, 0, tag, 2**30 - 1)
    (tmp_path / "a.tif").write_bytes(content)
    assert "EiB of memory" in check_refused(tmp_path / "a.tif", tmp_path, capsys)


OME = """<?xml version="1.0" encoding="UTF-8"?>
<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">
<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="{x}" SizeY="6" SizeZ="{z}"
SizeC="1" SizeT="1"><Channel ID="c" SamplesPerPixel="1"/>{planes}</Pixels></Image>
<StructuredAnnotations>{annotations}</StructuredAnnotations></OME>"""


def write_ome(path: Path, planes: str = "<TiffData/>", **keys: object) -> None:
    """Write slices with OME metadata; keys are extents, or annotations."""
    text = OME.format(**{"x": 7, "z": 5, "annotations": "", "planes": planes} | keys)
    with tifffile.TiffWriter(path) as file:
        for number, plane in enumerate(ARRAY):
            description = None if number else text
            file.write(plane, contiguous=False, metadata=None, description=description)


ENDLESS_AXIS = """<XMLAnnotation ID="a" Namespace="openmicroscopy.org/omero/dimension/modulo">
<Value><Modulo><ModuloAlongZ Type="angle" Start="0" End="1e12"/></Modulo></Value></XMLAnnotation>"""


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"z": 10**9}, "speak of 1000000000 planes, and it has 5"),
        ({"z": 50}, "speak of 50 planes, and it has 5"),
        (
            {"planes": f'<TiffData IFD="0" PlaneCount="{10**12}"/>'},
            "speak of 1000000000000 planes, and it has 5",
        ),
        ({"x": 9}, "Missing data are zeroed"),
        ({"annotations": ENDLESS_AXIS}, "too many positions on an axis"),
    ],
)
def test_ome_metadata_of_what_the_file_has_not(keys, what, tmp_path, capsys):
    write_ome(tmp_path / "a.tif", **keys)
    assert what in check_refused(tmp_path / "a.tif", tmp_path, capsys)


def test_ome_planes_in_an_order_of_their_own(tmp_path):
    planes = "".join(f'<TiffData FirstZ="{4 - n}" IFD="{n}" PlaneCount="1"/>' for n in range(5))
    write_ome(tmp_path / "a.tif", planes)
    check_converted(tmp_path / "a.tif", tmp_path, ARRAY[::-1])


@pytest.mark.parametrize("left_out", [0, 2, 4])
def test_ome_planes_without_a_page(left_out, tmp_path, capsys):
    """tifffile takes such planes for zeros, or fails in its own words."""
    places = [number for number in range(5) if number != left_out]
    planes = "".join(
        f'<TiffData FirstZ="{z}" IFD="{page}" PlaneCount="1"/>' for page, z in enumerate(places)
    )
    write_ome(tmp_path / "a.tif", planes)
    message = check_refused(tmp_path / "a.tif", tmp_path, capsys)
    assert f"no page for 1 of its 5 planes, such as number {left_out} (axes ZYX" in message


@pytest.mark.parametrize(
    ("changes", "page"),
    [
        ({1: ("1", "0")}, 0),  # a page of two planes
        ({1: ("0", "1")}, 1),  # a plane of two pages
        ({1: ("1", "-1")}, -1),
        ({1: ("-1", "1")}, 1),
        ({1: ("1", "1", "2")}, 2),  # two pages from here on, and the next begins in them
    ],
)
def test_ome_planes_of_which_one_would_hide_another(changes, page, tmp_path, capsys):
    places = [changes.get(n, (str(n), str(n))) for n in range(5)]
    planes = "".join(
        f'<TiffData FirstZ="{z}" IFD="{page}" PlaneCount="{(*count, 1)[0]}"/>'
        for z, page, *count in places
    )
    write_ome(tmp_path / "a.tif", planes)
    said = check_refused(tmp_path / "a.tif", tmp_path, capsys)
    assert "place a page twice, or two pages at one place, or below 0" in said
    assert f"(at page {page})" in said


def test_a_shape_in_tiff_metadata_that_is_not_that_of_its_pages(tmp_path, capsys):
    file = io.BytesIO()
    tifffile.imwrite(file, ARRAY, metadata={"axes": "ZYX"})
    (tmp_path / "a.tif").write_bytes(file.getvalue().replace(b"[5, 6, 7]", b"[7, 6, 5]"))
    assert "or what describes it, is damaged" in check_refused(tmp_path / "a.tif", tmp_path, capsys)


def test_an_imagej_stack_that_lost_images(tmp_path, capsys):
    file = io.BytesIO()
    tifffile.imwrite(file, np.zeros((5, 200, 200), np.uint8), imagej=True)
    (tmp_path / "a.tif").write_bytes(file.getvalue().replace(b"images=5", b"images=9"))
    message = check_refused(tmp_path / "a.tif", tmp_path, capsys)
    assert "says that it holds 9 images, and has room for 5" in message


@pytest.mark.parametrize("compression", [8, pytest.param(34925, marks=pytest.mark.slow)])
def test_a_tiff_strip_that_unpacks_without_end(compression, tmp_path, capsys):
    zeros = bytes(2**28)
    bomb = zlib.compress(zeros, 1) if compression == 8 else lzma.compress(zeros, preset=0)
    del zeros
    content = tiff_bytes(ARRAY[:1])
    for tag, value in ((COMPRESSION, compression), (273, len(content)), (279, len(bomb))):
        content = with_tag(content, 0, tag, value)
    (tmp_path / "a.tif").write_bytes(content + bomb)
    tracemalloc.start()
    message = check_refused(tmp_path / "a.tif", tmp_path, capsys)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "unpacks to more than its voxels" in message
    assert peak < 2**27


@pytest.mark.slow
def test_hdf5_groups_that_its_library_never_gets_through(tmp_path, capsys):
    """The time that it takes grows with the third power of the depth."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group: h5py.Group = file
        for _ in range(3000):
            group = group.create_group("g")
        group.create_dataset("v", data=ARRAY)
    with pytest.raises(VolumeError, match="did not end within 1 s"):
        run_apart(
            "a", "beam_inference.conversion.hdf5", "try_dataset", f"{tmp_path}/a.h5", cpu_seconds=1
        )


def test_ome_metadata_that_name_a_file_elsewhere(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    tifffile.imwrite(tmp_path / "other.ome.tif", ARRAY, ome=True, metadata={"axes": "ZYX"})
    text = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
        '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="7" '
        'SizeY="6" SizeZ="5" SizeC="1" SizeT="1"><TiffData IFD="0" PlaneCount="5">'
        '<UUID FileName="../other.ome.tif">urn:uuid:1</UUID></TiffData></Pixels></Image></OME>'
    )
    tifffile.imwrite(tmp_path / "in" / "a.ome.tif", ARRAY, description=text, metadata=None)
    message = check_refused(tmp_path / "in" / "a.ome.tif", tmp_path, capsys)
    assert "other files of an OME data set" in message


def png(width: int, height: int, data: bytes) -> bytes:
    parts = [b"\x89PNG\r\n\x1a\n"]
    header = struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    for kind, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        body = kind + content
        parts += [struct.pack(">I", len(content)), body, struct.pack(">I", zlib.crc32(body))]
    return b"".join(parts)


PNG_REFUSED = {
    "452 of 100000 by 100000": png(100_000, 100_000, zlib.compress(bytes(1000))),
    "454 truncated data": png(
        64, 64, zlib.compress(random_array("uint8", (64, 65)).tobytes())[:99]
    ),
    "455 no bytes": b"",
}


@pytest.mark.parametrize("case", PNG_REFUSED)
def test_pictures_are_refused(case, tmp_path, capsys):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "1.png").write_bytes(PNG_REFUSED[case])
    check_refused(tmp_path / "s" / "1.png", tmp_path, capsys)


def test_paths_of_odd_kinds(tmp_path, capsys):  # 167 to 171
    loop = tmp_path / "loop.npy"
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / "pipe.npy")
    for number, path in enumerate(
        [str(loop), "/dev/zero", f"{tmp_path}/pipe.npy", "a" * 5000, "a\0.npy"]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        message = check_refused(path, folder, capsys)
        assert len(message) < 1000
    with pytest.raises(UserError, match="there is nothing at"):
        plan_conversion("a\udcff.npy", f"{tmp_path}/out.npy", ConversionOptions())


def test_targets_of_odd_paths(tmp_path, capsys):
    np.save(tmp_path / "a.npy", ARRAY)
    size = "--voxel-size=8,8,8"
    for path in ("a" * 5000, f"{'a' * 300}.h5", "a\0.h5", "a\0"):
        assert main(["convert", f"{tmp_path}/a.npy", f"{tmp_path}/{path}", size]) == 2
        message = capsys.readouterr().err
        assert "error: " in message
        assert "not foreseen" not in message


def test_names_of_odd_letters(tmp_path):  # 460
    (tmp_path / "ü # % ? <.npy").write_bytes(npy())
    check_converted(tmp_path / "ü # % ? <.npy", tmp_path)


def test_a_good_nrrd_file_of_many_lines(tmp_path):  # 50
    (tmp_path / "a.nrrd").write_bytes(nrrd_bytes(ARRAY, ["kinds: domain domain domain"]))
    check_converted(tmp_path / "a.nrrd", tmp_path)


def test_notes_on_names_of_slices_steer_no_terminal(tmp_path, capsys):
    (tmp_path / "s").mkdir()
    for name in ("a\x1b[31m0", "a\x1b[31m1", "b\x1b]0;x\x073"):
        Image.fromarray(random_array("uint8", (8, 9))).save(tmp_path / "s" / f"{name}.png")
    assert main(["convert", f"{tmp_path}/s", f"{tmp_path}/a.npy", "--drop=voxel-size,offset"]) == 0
    told = capsys.readouterr()
    assert r"the order of the slices is a\x1b[31m0.png" in told.err
    assert not {"\x1b", "\x07"}.intersection(told.out + told.err)
