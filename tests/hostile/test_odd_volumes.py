"""Volumes whose metadata lie or are extreme, damaged blocks, unusual arrays, and odd paths.

The numbers in the ids are those of the list of hostile cases.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from helpers import job_values, write_job, write_volume
from hostile.conftest import run_words

SHAPE = (32, 32, 32)
SMALL = {"start": [0, 0, 0], "stop": [16, 32, 32]}
REFUSED = (2,)
PLANNED_OR_REFUSED = (0, 2)


def image(shape: tuple[int, ...] = SHAPE, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


def job_over(source: Path | str, folder: Path, **sections: Any) -> str:
    sections = {"model": {"normalize": "none"}} | sections
    return str(write_job(folder / "job.yaml", job_values(source, folder / "out", **sections)))


def check_answer(words: list[str], codes: tuple[int, ...], capsys: Any) -> str:
    """Check the exit code of a command, and that it gives messages, not traces."""
    code = run_words(words)
    told = capsys.readouterr()
    assert code in codes, (code, told.err[-2000:])
    for text in (told.out, told.err):
        assert "Traceback" not in text
        assert "not foreseen" not in text
    if code == 2:
        assert "error: " in told.err
    return str(told.out + told.err)


def check_values(source: Path | str, array: np.ndarray, folder: Path) -> None:
    """Check what a volume holds (z, y, x) by a copy of it."""
    target = folder / "copy.npy"
    words = ["convert", str(source), str(target), "--drop=voxel-size,offset", "--overwrite"]
    assert run_words(words) == 0
    np.testing.assert_array_equal(np.load(target), array)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A sound precomputed volume of eight blocks."""
    write_volume(tmp_path / "em", image(), block_shape=(16, 16, 16))
    return tmp_path / "em"


def edit_info(volume: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((volume / "info").read_text())
    change(info)
    text = json.dumps(info).replace("Infinity", "1e400")
    (volume / "info").write_text(text)


def of_scale(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda info: info["scales"][0].update({key: value})


def of_info(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda info: info.update({key: value})


def of_many_scales(count: int) -> Callable[[dict[str, Any]], object]:
    return lambda info: info.update(scales=info["scales"] * count)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("chunks", [10**6, 10**6, 4], "3.64 TiB of memory"),
        ("chunks", [10**14, 4, 4], "1.42 PiB of memory"),
        ("chunks", [2**62 - 1, 1, 1], "blocks that no array has"),
        ("dtype", [["a", "|u1", [10**6, 10**6]], ["b", "|u1"]], "a record of 1000000000001 bytes"),
        ("dtype", f"|V{10**11}", "a record of 100000000000 bytes"),
    ],
)
def test_zarr_blocks_and_records_larger_than_memory(key, value, what, tmp_path, capsys):
    write_volume(tmp_path / "em", image(), format="zarr2", block_shape=(16, 16, 16))
    metadata = json.loads((tmp_path / "em" / ".zarray").read_text())
    metadata |= {key: value, "fill_value": None}
    (tmp_path / "em" / ".zarray").write_text(json.dumps(metadata))
    assert what in check_answer(["convert", tmp_path / "em", tmp_path / "a.npy"], REFUSED, capsys)
    assert what in check_answer(["plan", job_over(tmp_path / "em", tmp_path)], REFUSED, capsys)


SHARDING = {
    "@type": "neuroglancer_uint64_sharded_v1",
    "hash": "identity",
    "preshift_bits": 63,
    "minishard_bits": 60,
    "shard_bits": 60,
    "minishard_index_encoding": "raw",
    "data_encoding": "raw",
}

INFOS = {
    208: (of_scale("size", [10**12] * 3), PLANNED_OR_REFUSED),
    211: (of_scale("size", [2**62] * 3), REFUSED),
    214: (of_scale("size", [-5, 32, 32]), REFUSED),
    215: (of_scale("size", [0, 32, 32]), REFUSED),
    "215: of 0 everywhere": (of_scale("size", [0, 0, 0]), REFUSED),
    216: (of_scale("size", [32.5, 32, 32]), REFUSED),
    218: (of_scale("resolution", [math.nan, 10, 10]), REFUSED),
    219: (of_scale("resolution", [-10, 10, 10]), PLANNED_OR_REFUSED),
    220: (of_scale("resolution", [0, 10, 10]), PLANNED_OR_REFUSED),
    221: (of_scale("resolution", [math.inf, 10, 10]), PLANNED_OR_REFUSED),
    223: (of_scale("voxel_offset", [2**62, 0, 0]), REFUSED),
    225: (of_scale("chunk_sizes", [[0, 0, 0]]), REFUSED),
    226: (of_scale("key", "../../secret"), PLANNED_OR_REFUSED),
    228: (of_scale("key", "/etc"), PLANNED_OR_REFUSED),
    229: (of_info("data_type", "float128"), REFUSED),
    230: (of_info("num_channels", 10**9), REFUSED),
    232: (of_info("num_channels", 0), REFUSED),
    "235: of 10,000": (of_many_scales(10_000), PLANNED_OR_REFUSED),
    281: (of_scale("sharding", SHARDING), REFUSED),
    283: (of_scale("encoding", "compressed_segmentation"), REFUSED),
}

TEXTS = {
    237: "[1, 2]",
    238: "[" * 100_000,
    "238: of objects": '{"scales":' * 100_000,
    "238: closed": '{"scales": ' + "[" * 100_000 + "]" * 100_000 + "}",
    240: "",
}


@pytest.mark.parametrize("row", INFOS)
def test_an_info_file_that_lies(row, volume, tmp_path, capsys):
    change, codes = INFOS[row]
    edit_info(volume, change)
    check_answer(["plan", job_over(volume, tmp_path)], codes, capsys)


@pytest.mark.slow
def test_235_an_info_file_of_100_000_scales(volume, tmp_path, capsys):
    edit_info(volume, of_many_scales(100_000))
    check_answer(["plan", job_over(volume, tmp_path)], PLANNED_OR_REFUSED, capsys)


@pytest.mark.parametrize("row", TEXTS)
def test_an_info_file_that_is_none(row, volume, tmp_path, capsys):
    (volume / "info").write_text(TEXTS[row])
    check_answer(["plan", job_over(volume, tmp_path)], REFUSED, capsys)


def test_207_a_good_volume(volume, tmp_path):
    check_values(volume, image(), tmp_path)


def test_242_an_info_file_of_many_spaces(volume, tmp_path, capsys):
    (volume / "info").write_text((volume / "info").read_text() + " " * 30_000_000)
    check_answer(["plan", job_over(volume, tmp_path)], (0,), capsys)


def test_213_a_small_part_of_a_vast_volume(volume, tmp_path, capsys):
    edit_info(volume, of_scale("size", [10**6] * 3))
    check_answer(["run", job_over(volume, tmp_path, roi=SMALL)], (0,), capsys)


def test_224_blocks_of_a_million_cubed(volume, tmp_path, capsys):
    edit_info(volume, of_scale("size", [10**6] * 3))
    edit_info(volume, of_scale("chunk_sizes", [[10**6] * 3]))
    words = ["run", job_over(volume, tmp_path, roi=SMALL)]
    check_answer(words, (1, 2, 3), capsys)


def test_244_247_249_blocks_of_another_length_are_quarantined(volume, tmp_path, capsys):
    first, second, third, *_ = sorted(volume.glob("*/*-*_*"))
    first.write_bytes(first.read_bytes()[:1000])
    second.write_bytes(second.read_bytes() + b"ab")
    third.write_bytes(b"")
    inference = {"chunk_shape": [16, 16, 16], "patch_shape": [8, 8, 8], "patch_overlap": [0, 0, 0]}
    job = job_over(volume, tmp_path, inference=inference)
    told = check_answer(["run", job, "--max_failed_chunks=3"], (3,), capsys)
    assert re.search(r"\b3 .*quarantine|quarantine.*\b3\b", told), told


def test_280_blocks_in_another_encoding_are_quarantined(volume, tmp_path, capsys):
    edit_info(volume, of_scale("encoding", "jpeg"))
    check_answer(["run", job_over(volume, tmp_path), "--max_failed_chunks=9"], (3,), capsys)


def create(folder: Path, array: np.ndarray, driver: str = "zarr3", **metadata: Any) -> str:
    spec = {
        "driver": driver,
        "kvstore": f"file://{folder}/",
        "metadata": {"shape": list(array.shape), **metadata},
        "dtype": array.dtype.name,
    }
    store = ts.open(spec, create=True).result()
    if array.size:
        store.write(array).result()
    return f"file://{folder}"


def chunked(shape: list[int]) -> dict[str, Any]:
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}}}


def codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


BYTES = codec("bytes")
BLOCKS = chunked([16, 16, 16])
ARRAYS: dict[int, dict[str, Any]] = {
    296: {
        **BLOCKS,
        "codecs": [
            BYTES,
            codec("blosc", cname="lz4", clevel=5, shuffle="shuffle", typesize=1, blocksize=0),
        ],
    },
    301: {**BLOCKS, "codecs": [BYTES, codec("zstd", level=1, checksum=True)]},
    302: {**BLOCKS, "codecs": [BYTES, codec("gzip", level=1), codec("crc32c")]},
    304: {
        **BLOCKS,
        "codecs": [codec("sharding_indexed", chunk_shape=[8, 8, 8], codecs=[BYTES])],
    },
    305: chunked([15, 14, 13]),
    306: {"driver": "zarr", "order": "F", "chunks": [16] * 3, "compressor": {"id": "zstd"}},
    307: {"driver": "zarr", "order": "F", "chunks": [16] * 3, "compressor": {"id": "blosc"}},
}


@pytest.mark.parametrize("row", ARRAYS)
def test_arrays_of_zarr(row, tmp_path):
    url = create(tmp_path / "a", image(), **ARRAYS[row])
    check_values(url, image(), tmp_path)


def test_308_an_absent_block_where_nothing_says_what_fills_it(tmp_path):
    url = create(tmp_path / "a", image(), "zarr", chunks=[16] * 3, dtype="|u1", fill_value=None)
    (tmp_path / "a" / "1.1.1").unlink()
    expected = image()
    expected[16:, 16:, 16:] = 0
    check_values(url, expected, tmp_path)


def test_309_five_axes_without_names(tmp_path, capsys):
    url = create(tmp_path / "a", image()[None, None])
    told = check_answer(["plan", job_over(url, tmp_path)], REFUSED, capsys)
    assert "input.spec" in told


def test_310_311_312_named_axes_and_big_endian_values(tmp_path):
    whole = image()[None, None]
    check_values(create(tmp_path / "310", whole, dimension_names=list("tczyx")), image(), tmp_path)
    turned = image().transpose(2, 1, 0).copy()
    check_values(create(tmp_path / "311", turned, dimension_names=list("xyz")), image(), tmp_path)
    wide = image(dtype="uint16") * np.uint16(257)
    big = create(tmp_path / "312", wide, codecs=[codec("bytes", endian="big")])
    check_values(big, wide, tmp_path)


@pytest.mark.parametrize(("row", "dtype"), [(314, "bool"), (315, "complex64")])
def test_values_that_are_no_numbers(row, dtype, tmp_path, capsys):
    url = create(tmp_path / "a", image().astype(dtype))
    told = check_answer(["plan", job_over(url, tmp_path)], REFUSED, capsys)
    assert "expected integers or floating-point numbers" in told, row


def test_316_values_that_are_not_finite(tmp_path, capsys):
    array = image(dtype="float32")
    array[3, 4, 5] = math.nan
    array[20, 20, 20] = math.inf
    url = create(tmp_path / "a", array)
    check_answer(["run", job_over(url, tmp_path)], (2, 3), capsys)


@pytest.mark.parametrize("command", ["plan", "convert", "levels", "thumbnail", "view"])
def test_317_an_array_of_no_voxels(command, tmp_path, capsys):
    url = create(tmp_path / "a", np.zeros((0, 32, 32), np.uint8))
    words = {
        "plan": [job_over(url, tmp_path)],
        "convert": [url, str(tmp_path / "c")],
        "levels": [url, f"--to={tmp_path}/levels.json"],
        "thumbnail": [url],
        "view": [url, "--link"],
    }[command]
    told = check_answer([command, *words], REFUSED, capsys)
    assert "has no voxels: it has the shape [1, 0, 32, 32]" in told


ZARR_JSONS = {
    318: ({"shape": [10**12] * 3}, PLANNED_OR_REFUSED),
    319: ({"codecs": [{"name": "bytes"}, {"name": "unheard_of"}]}, REFUSED),
    321: ({"fill_value": "NaN"}, REFUSED),
}


@pytest.mark.parametrize("row", ZARR_JSONS)
def test_a_zarr_json_that_lies(row, tmp_path, capsys):
    change, codes = ZARR_JSONS[row]
    url = create(tmp_path / "a", image())
    file = tmp_path / "a" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    check_answer(["plan", job_over(url, tmp_path)], codes, capsys)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 1, 40)], ids=["286", "291"])
def test_volumes_smaller_than_a_patch(size, tmp_path, capsys):
    url = create(tmp_path / "a", image(size))
    told = check_answer(["run", job_over(url, tmp_path)], PLANNED_OR_REFUSED, capsys)
    assert "patch" in told or "complete" in told


def test_322_a_flipped_byte_where_nothing_checks_it(tmp_path, capsys):
    url = create(tmp_path / "a", image(), **BLOCKS, codecs=[BYTES, codec("zstd", level=1)])
    block = tmp_path / "a" / "c" / "0" / "0" / "0"
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 0xFF
    block.write_bytes(content)
    # The values may be wrong, which nobody can know, or not decoded.
    words = ["run", job_over(url, tmp_path), "--max_failed_chunks=9"]
    check_answer(words, (0, 3), capsys)


def test_324_a_block_that_is_a_bomb(tmp_path, capsys):
    url = create(tmp_path / "a", image(), **BLOCKS, codecs=[BYTES, codec("gzip", level=1)])
    bomb_bytes = 3 * 2**29
    packer = zlib.compressobj(1, wbits=31)
    zeros = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    bomb = zeros + again * (bomb_bytes // 2**24)
    (tmp_path / "a" / "c" / "0" / "0" / "0").write_bytes(bomb)
    words = ["run", job_over(url, tmp_path), "--max_failed_chunks=9"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    check_answer(words, (3,), capsys)
    assert _memory("VmHWM") - before < bomb_bytes // 2


def _memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])  # type: ignore[index]


@pytest.mark.parametrize(
    "name", ["ünï cödé 日本", "a b", "a#b", "100%", "a%20b", "a?b", "a<b"], ids="326-{}".format
)
def test_odd_names_of_folders(name, volume, tmp_path):
    volume.rename(tmp_path / name)
    check_values(tmp_path / name, image(), tmp_path)


def test_327_333_roundabout_paths(volume, tmp_path):
    (tmp_path / "link").symlink_to(volume)
    check_values(tmp_path / "link", image(), tmp_path)
    check_values(f"{volume}/../em/../em", image(), tmp_path)


def test_328_a_loop_of_links(tmp_path, capsys):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    check_answer(["plan", job_over(tmp_path / "a", tmp_path)], REFUSED, capsys)


@pytest.mark.parametrize(
    "path",
    ["/" + "a" * 5000, "/tmp/a\0b", "/tmp/a\nb", "/proc", "/dev/zero"],
    ids=["329", "331", "332", "334", "336"],
)
def test_paths_that_lead_nowhere(path, tmp_path, capsys):
    check_answer(["plan", job_over(path, tmp_path)], REFUSED, capsys)
    assert not os.path.exists(tmp_path / "out")


def test_a_transform_that_repeats_an_axis_has_blocks(
    volume: Path, tmp_path: Path, capsys: Any
) -> None:
    """TensorStore states no blocks along an axis that is not stored."""
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": volume.as_uri() + "/",
        "transform": {
            "input_labels": ["z", "y", "x"],
            "input_inclusive_min": [0, 0, 0],
            "input_exclusive_max": [32, 32, 32],
            "output": [{"input_dimension": 2}, {"input_dimension": 1}, {"offset": 3}, {}],
        },
    }
    check_answer(
        ["plan", job_over("x", tmp_path, input={"path": None, "spec": spec})], (0,), capsys
    )


def test_a_volume_of_more_chunks_than_anybody_computes(tmp_path, refused):
    """Where their ranges were listed, a metadata file of a kilobyte took all memory."""
    write_volume(tmp_path / "em", image(), block_shape=(16, 16, 16), format="ome_zarr")
    (metadata,) = (tmp_path / "em").glob("*/zarr.json")
    values = json.loads(metadata.read_text())
    values["shape"] = [*values["shape"][:-3], 2**40, 2**40, 2**40]
    metadata.write_text(json.dumps(values))
    words = {
        "pyramid": [tmp_path / "em"],
        "components": [tmp_path / "em", tmp_path / "ids", "--threshold=5"],
        "levels": [tmp_path / "em", "--to", tmp_path / "levels.json"],
        "plan": [job_over(tmp_path / "em", tmp_path)],
    }
    for command, rest in words.items():
        assert re.search(r"would have \S+e\+\d\d chunks, and 1e\+12 are", refused([command, *rest]))
