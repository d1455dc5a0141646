"""Compare what outputs cost to store: bytes, objects, and the seconds to write and to read them.

    python -m benchmarks.storage --data ../shared/data

Affinities of a part of FIB-25 by the network of the tests, as float32, float16 and uint8, and the
labels of its bodies as uint32, in blocks of 64³, written chunk by chunk as a job does, two chunks
of 128³; shards are as large as chunks. Every array is read again and must be what was written.
Written to ``benchmarks/results/storage.json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tensorstore as ts
from cloudvolume import CloudVolume  # type: ignore[import-untyped]
from numpy.typing import NDArray
from safetensors.torch import load_file

from beam_inference import predict
from beam_inference.config.fields import Json
from beam_inference.volumes.sharding import precomputed_sharding
from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results" / "storage.json"
NETWORKS = Path(__file__).parents[1] / "tests" / "networks"
BLOCK = 64
CHUNK = 128
SHAPE = (CHUNK, CHUNK, 2 * CHUNK)
_SHUFFLED = {"cname": "zstd", "clevel": 1, "shuffle": 1}


@dataclass(frozen=True)
class Way:
    """One way to store an array.

    Attributes:
        format: name of the format, by its driver.
        codec: words for its compression.
        spec: members of TensorStore's spec, of an array.
        is_sharded: whether a chunk is one file.
    """

    format: str
    codec: str
    spec: Callable[[NDArray[Any]], Json]
    is_sharded: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of FIB-25")
    parser.add_argument("--repeats", type=int, default=3)
    known = parser.parse_args()
    arrays = arrays_of(known.data)
    rows = [
        {"values": name} | measured(array, way, known.repeats)
        for name, array in arrays.items()
        for way in ways_of(name, array)
    ]
    figures = {
        "machine": machine("tensorstore", "cloud-volume"),
        "voxels": int(np.prod(SHAPE)),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def arrays_of(data: Path) -> dict[str, NDArray[Any]]:
    """What is stored, by name: arrays (c, z, y, x)."""
    image = _cropped(np.load(data / "fib25_medulla_train2_image.npy"))
    with np.load(data / "fib25_medulla_train2_labels.npz") as file:
        labels = _cropped(file["labels"])
    affinities = predict(
        image,
        _network(),
        patch_shape=(64, 64, 64),
        patch_overlap=(16, 16, 16),
        output_channels=3,
        normalize="unit",
        activation="sigmoid",
        device="cpu",
        fill="reflect",
    )
    uint8 = np.rint(affinities * 255).astype(np.uint8)
    return {
        "affinities, float32": affinities,
        "affinities, float16": affinities.astype(np.float16),
        "affinities, uint8": uint8,
        "one channel, uint8": uint8[:1],
        "labels, uint32": labels[None].astype(np.uint32),
    }


def _cropped(array: NDArray[Any]) -> NDArray[Any]:
    """The first voxels, with the last few mirrored where there are not as many."""
    z, y, x = SHAPE
    return np.pad(array, [(0, 0), (0, 0), (0, x - array.shape[2])], mode="reflect")[:z, :y]


def _network() -> Any:
    sys.path.insert(0, str(NETWORKS))
    network = importlib.import_module("fib25").fib25_network()
    network.load_state_dict(load_file(NETWORKS / "fib25.safetensors"))
    return network.eval()


def ways_of(name: str, array: NDArray[Any]) -> Iterator[Way]:
    """Ways to store an array; formats are left out that cannot hold its dtype."""
    if array.dtype != np.float16:
        yield from _precomputed_ways(name, array)
    yield from _zarr_ways()


def _precomputed_ways(name: str, array: NDArray[Any]) -> Iterator[Way]:
    encodings = ["raw"]
    if name.startswith("labels"):
        encodings.append("compressed_segmentation")
    if len(array) == 1 and array.dtype == np.uint8:
        encodings.append("png")
    for encoding in encodings:
        yield Way("precomputed", encoding, _precomputed(encoding, sharded=False))
        yield Way("precomputed", f"{encoding}, gzip", _precomputed(encoding, sharded=True), True)


def _precomputed(encoding: str, *, sharded: bool) -> Callable[[NDArray[Any]], Json]:
    def spec(array: NDArray[Any]) -> Json:
        scale: Json = {
            "size": list(array.shape[:0:-1]),
            "resolution": [10, 10, 10],
            "chunk_size": [BLOCK] * 3,
            "encoding": encoding,
        }
        if encoding == "compressed_segmentation":
            scale["compressed_segmentation_block_size"] = [8, 8, 8]
        if sharded:
            scale["sharding"] = precomputed_sharding(SHAPE, (BLOCK,) * 3, (CHUNK,) * 3)
        kind = "segmentation" if array.dtype == np.uint32 else "image"
        return {
            "driver": "neuroglancer_precomputed",
            "multiscale_metadata": {
                "type": kind,
                "data_type": array.dtype.name,
                "num_channels": len(array),
            },
            "scale_metadata": scale,
        }

    return spec


def _zarr_ways() -> Iterator[Way]:
    codecs: dict[str, list[Json]] = {
        "raw": [],
        "gzip": [{"name": "gzip", "configuration": {"level": 6}}],
        "zstd 1": [{"name": "zstd", "configuration": {"level": 1}}],
        "zstd 5": [{"name": "zstd", "configuration": {"level": 5}}],
        "blosc: zstd 1, shuffle": [_blosc("shuffle")],
        "blosc: zstd 1, bitshuffle": [_blosc("bitshuffle")],
    }
    for name, codec in codecs.items():
        yield Way("zarr3", name, _zarr3(codec, sharded=False))
    for name in ("zstd 1", "blosc: zstd 1, shuffle"):
        yield Way("zarr3", name, _zarr3(codecs[name], sharded=True), True)
    yield Way("zarr2", "TensorStore's default", _zarr2(None))
    yield Way("zarr2", "blosc: zstd 1, shuffle", _zarr2({"id": "blosc", **_SHUFFLED}))


def _blosc(shuffle: str) -> Json:
    return {"name": "blosc", "configuration": {**_SHUFFLED, "shuffle": shuffle}}


def _zarr3(codecs: list[Json], *, sharded: bool) -> Callable[[NDArray[Any]], Json]:
    def spec(array: NDArray[Any]) -> Json:
        inner: list[Json] = [{"name": "bytes"}, *codecs]
        side = BLOCK
        if sharded:
            shape = [len(array), BLOCK, BLOCK, BLOCK]
            configuration = {"chunk_shape": shape, "codecs": inner}
            inner = [{"name": "sharding_indexed", "configuration": configuration}]
            side = CHUNK
        grid = {"chunk_shape": [len(array), side, side, side]}
        return {
            "driver": "zarr3",
            "metadata": {
                "shape": list(array.shape),
                "chunk_grid": {"name": "regular", "configuration": grid},
                "data_type": array.dtype.name,
                "codecs": inner,
            },
        }

    return spec


def _zarr2(compressor: Json | None) -> Callable[[NDArray[Any]], Json]:
    def spec(array: NDArray[Any]) -> Json:
        metadata = {
            "shape": list(array.shape),
            "chunks": [len(array), BLOCK, BLOCK, BLOCK],
            "dtype": array.dtype.str,
            "dimension_separator": "/",
            **({} if compressor is None else {"compressor": compressor}),
        }
        return {"driver": "zarr", "metadata": metadata}

    return spec


def measured(array: NDArray[Any], way: Way, repeats: int) -> Json:
    """What an array costs to store in one way; times are medians."""
    runs = [_once(array, way) for _ in range(repeats)]
    row = {"format": way.format, "codec": way.codec, "sharded": way.is_sharded, **runs[0]}
    for key in [key for key in row if key.endswith("_seconds")]:
        row[key] = round(median(run[key] for run in runs), 4)
    return row


def _once(array: NDArray[Any], way: Way) -> Json:
    folder = Path(tempfile.mkdtemp())
    try:
        spec = {**way.spec(array), "kvstore": f"file://{folder}/"}
        start = time.perf_counter()
        store = _as_czyx(ts.open(spec, create=True).result())
        for x in range(0, SHAPE[2], CHUNK):
            store[..., x : x + CHUNK].write(array[..., x : x + CHUNK]).result()
        written = time.perf_counter() - start
        files = [each for each in folder.rglob("*") if each.is_file()]
        read, found = _timed(lambda: _as_czyx(_opened(spec)).read().result())
        assert np.array_equal(found, array), f"{way} does not read back what was written"
        corner = (slice(None), *(slice(0, BLOCK),) * 3)
        one, _ = _timed(lambda: _as_czyx(_opened(spec))[corner].read().result())
        row = {
            "bytes": sum(each.stat().st_size for each in files),
            "share": round(sum(each.stat().st_size for each in files) / array.nbytes, 4),
            "objects": len(files),
            "write_seconds": written,
            "read_seconds": read,
            "block_seconds": one,
        }
        # its codec of png is a package of its own
        if way.format == "precomputed" and not way.codec.startswith("png"):
            row["cloud_volume_seconds"] = _read_with_cloud_volume(folder, array)
        return row
    finally:
        shutil.rmtree(folder)


def _opened(spec: Json) -> ts.TensorStore:
    return ts.open({"driver": spec["driver"], "kvstore": spec["kvstore"]}).result()


def _as_czyx(store: ts.TensorStore) -> ts.TensorStore:
    is_precomputed = store.spec().to_json()["driver"] == "neuroglancer_precomputed"
    return store.T if is_precomputed else store


def _read_with_cloud_volume(folder: Path, array: NDArray[Any]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        volume = CloudVolume(f"file://{folder}", progress=False)
        seconds, found = _timed(lambda: np.asarray(volume[:]))
    assert np.array_equal(found.T, array), "cloud-volume reads something else"
    return seconds


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
