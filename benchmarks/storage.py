"""Compare what outputs cost to store: bytes, objects, and the seconds to write and to read them.

    python -m benchmarks.storage --data ../shared/data

Affinities of a part of FIB-25 by the network of the tests, as float32, float16 and uint8, and the
labels of its bodies as uint32, in blocks of 64³, written chunk by chunk as a job does, two chunks
of 128³. Every array is read again and must be what was written. Where a Chromium is installed,
Neuroglancer opens each volume and shows a section through all of it: what it fetches is counted.
Sums that chunks pass to each other by ``strategy: exchange`` depend on the shards, which a chunk
writes whole: they are counted for a job over 1024³ voxels. Written to
``benchmarks/results/storage.json``.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import make_plan
from beam_inference.geometry.seam_sums import seam_bytes
from beam_inference.geometry.zyx import Zyx
from beam_inference.view.layers import view_of
from beam_inference.volumes.opening import as_volume
from beam_inference.volumes.sharding import precomputed_sharding
from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results" / "storage.json"
TESTS = Path(__file__).parents[1] / "tests"
NETWORKS = TESTS / "networks"
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
        blocks: blocks of a shard; 0 for a file a block.
        by_us: whether shards are written as jobs write them, and not by TensorStore.
    """

    format: str
    codec: str
    spec: Callable[[NDArray[Any]], Json]
    blocks: int = 0
    by_us: bool = False


_SHOWN = ("affinities, uint8", "labels, uint32")
"""Values that are opened in Neuroglancer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of FIB-25")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["precomputed", "zarr3", "zarr2"],
        help="those to measure; rows of the others stay",
    )
    known = parser.parse_args()
    arrays = arrays_of(known.data)
    with ExitStack() as stack:
        has_browser = all(map(shutil.which, ("chromium", "chromedriver")))
        page = stack.enter_context(_of_tests("browser").chromium()) if has_browser else None
        rows = [
            {"values": name} | measured(array, way, known.repeats, page if name in _SHOWN else None)
            for name, array in arrays.items()
            for way in ways_of(name, array)
            if way.format in known.formats
        ]
    earlier = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = [row for row in earlier if row["format"] not in known.formats]
    figures = {
        "machine": machine("tensorstore", "cloud-volume", "neuroglancer"),
        "voxels": int(np.prod(SHAPE)),
        "rows": sorted(rows + kept, key=lambda row: list(arrays).index(row["values"])),
        "integers": integers(arrays["affinities, uint8"]),
        "exchange": exchange(),
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


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
    network = _of_tests("networks/fib25").fib25_network()
    network.load_state_dict(load_file(NETWORKS / "fib25.safetensors"))
    return network.eval()


def _of_tests(path: str) -> Any:
    """A module in the folder of the tests, which is no package."""
    file = TESTS / path
    sys.path.insert(0, str(file.parent))
    return importlib.import_module(file.name)


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
        yield Way("precomputed", encoding, _precomputed(encoding, 0))
        gzip = f"{encoding}, gzip"
        if encoding == "raw":
            yield Way("precomputed", f"{gzip} by TensorStore", _precomputed(encoding, 8), 8)
            yield Way("precomputed", gzip, _precomputed(encoding, 1), 1, by_us=True)
        yield Way("precomputed", gzip, _precomputed(encoding, 8), 8, by_us=True)


def _precomputed(encoding: str, blocks: int) -> Callable[[NDArray[Any]], Json]:
    def spec(array: NDArray[Any]) -> Json:
        scale: Json = {
            "size": list(array.shape[:0:-1]),
            "resolution": [10, 10, 10],
            "chunk_size": [BLOCK] * 3,
            "encoding": encoding,
        }
        if encoding == "compressed_segmentation":
            scale["compressed_segmentation_block_size"] = [8, 8, 8]
        if blocks:
            side = round(BLOCK * blocks ** (1 / 3))
            scale["sharding"] = precomputed_sharding(SHAPE, (BLOCK,) * 3, (side,) * 3)
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
        yield Way("zarr3", name, _zarr3(codecs[name], sharded=True), 8)
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


def measured(array: NDArray[Any], way: Way, repeats: int, page: Any) -> Json:
    """What an array costs to store in one way; times are medians."""
    runs = [_once(array, way, page if number == 0 else None) for number in range(repeats)]
    row = {"format": way.format, "codec": way.codec, "blocks": way.blocks, **runs[0]}
    for key in ("write_seconds", "read_seconds", "block_seconds", "cloud_volume_seconds"):
        if row.get(key) is not None:
            row[key] = round(median(run[key] for run in runs), 4)
    return row


def _once(array: NDArray[Any], way: Way, page: Any) -> Json:
    folder = Path(tempfile.mkdtemp())
    try:
        spec = {**way.spec(array), "kvstore": f"file://{folder}/"}
        start = time.perf_counter()
        store = ts.open(spec, create=True).result()
        volume = as_volume(f"file://{folder}", store)
        for x in range(0, SHAPE[2], CHUNK):
            part = array[..., x : x + CHUNK]
            if way.by_us:
                volume.write(BoundingBox((0, 0, x), (*SHAPE[:2], x + CHUNK)), part)
            else:
                _as_czyx(store)[..., x : x + CHUNK].write(part).result()
        written = time.perf_counter() - start
        files = [each for each in folder.rglob("*") if each.is_file()]
        read, found = _timed(lambda: _as_czyx(_opened(spec)).read().result())
        assert np.array_equal(found, array), f"{way} does not read back what was written"
        corner = (slice(None), *(slice(0, BLOCK),) * 3)
        one, _ = _timed(lambda: _as_czyx(_opened(spec))[corner].read().result())
        row: Json = {
            "bytes": sum(each.stat().st_size for each in files),
            "share": round(sum(each.stat().st_size for each in files) / array.nbytes, 4),
            "objects": len(files),
            "write_seconds": written,
            "read_seconds": read,
            "block_seconds": one,
            "cloud_volume_seconds": _read_with_cloud_volume(folder, way, array),
        }
        if page is not None:
            row["neuroglancer"] = _show_in_neuroglancer(folder, page)
        return row
    finally:
        shutil.rmtree(folder)


@dataclass
class _Fetched:
    """What a browser has fetched of a volume."""

    requests: int = 0
    bytes: int = 0
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def count(self, handler: Any) -> None:
        """Count a request of Tornado's, if it was answered with a part of the volume."""
        if "/data/" in handler.request.path and handler.get_status() in (200, 206):
            self.requests += 1
            self.bytes += int(handler._headers.get("Content-Length", 0))


def _show_in_neuroglancer(folder: Path, page: Any) -> Json:
    """Requests, bytes and seconds until a section through all of a volume is shown."""
    browser = _of_tests("browser")
    view = view_of(None, [f"file://{folder}"], patches=False)
    fetched = _Fetched()

    def state(base: str) -> Json:
        close: Json = browser.microscope(view.state(base, 100), voxels_per_pixel=1)
        return close

    with browser.served(view.folders, state, fetched.count) as url:
        seconds, _ = _timed(lambda: page.open(url))
        assert not page.layer_errors(), page.layer_errors()
    return {"requests": fetched.requests, "bytes": fetched.bytes, "seconds": round(seconds, 2)}


def _opened(spec: Json) -> ts.TensorStore:
    return ts.open({"driver": spec["driver"], "kvstore": spec["kvstore"]}).result()


def _as_czyx(store: ts.TensorStore) -> ts.TensorStore:
    is_precomputed = store.spec().to_json()["driver"] == "neuroglancer_precomputed"
    return store.T if is_precomputed else store


def _read_with_cloud_volume(folder: Path, way: Way, array: NDArray[Any]) -> float | None:
    """Seconds to read all of a volume; None where cloud-volume says that it cannot."""
    scheme = {"precomputed": "precomputed", "zarr3": "zarr3", "zarr2": "zarr2"}[way.format]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            volume = CloudVolume(f"{scheme}://file://{folder}", progress=False)
            seconds, found = _timed(lambda: np.asarray(volume[:]))
        except Exception as error:  # whatever it is: the reader does not read it
            print(f"cloud-volume and {way.format}, {way.codec}: {type(error).__name__}: {error}")
            return None
    if way.format != "precomputed" and not np.array_equal(found.T, array):
        print(f"cloud-volume and {way.format}, {way.codec}: other values")
        return None
    assert np.array_equal(found.T, array), "cloud-volume reads something else"
    return seconds


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def integers(array: NDArray[Any]) -> list[Json]:
    """Shares of their bytes that uint8 affinities take by further codecs of zarr, and how fast.

    ``delta``: each value is the difference from its neighbour along x, with overflow.
    """
    delta = np.diff(array, axis=3, prepend=array.dtype.type(0))
    rows = []
    for name, codec in _INTEGER_CODECS.items():
        for how, values in (("", array), ("delta", delta), ("a block a channel", array)):
            channels = 1 if how == "a block a channel" else len(values)
            rows.append({"codec": name, "how": how, **_packed(values, codec, channels)})
    return rows


_INTEGER_CODECS: dict[str, Json] = {
    **{f"gzip {n}": {"name": "gzip", "configuration": {"level": n}} for n in (1, 6)},
    **{f"zstd {n}": {"name": "zstd", "configuration": {"level": n}} for n in (1, 5, 12)},
    "blosc: zstd 5, bitshuffle": {
        "name": "blosc",
        "configuration": {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle"},
    },
}


def _packed(values: NDArray[Any], codec: Json, channels: int) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        grid = {"chunk_shape": [channels, BLOCK, BLOCK, BLOCK]}
        metadata = {
            "shape": list(values.shape),
            "chunk_grid": {"name": "regular", "configuration": grid},
            "data_type": values.dtype.name,
            "codecs": [{"name": "bytes"}, codec],
        }
        spec = {"driver": "zarr3", "kvstore": f"file://{folder}/", "metadata": metadata}
        store = ts.open(spec, create=True).result()
        before = time.process_time()
        store.write(values).result()
        seconds = time.process_time() - before
        size = sum(each.stat().st_size for each in Path(folder).rglob("*") if each.is_file())
    speed = round(values.nbytes / seconds / 1e6, 1)
    return {"share": round(size / values.nbytes, 4), "megabytes_per_cpu_second": speed}


def exchange() -> list[Json]:
    """Bytes of sums that chunks pass on, by what one write replaces; blocks are of 64³."""
    rows = []
    for chunk in (128, 256, 512):
        for side in dict.fromkeys((64, 128, chunk)):
            shape: Zyx = (side, side, side)
            rows.append({"chunk": chunk, "shard": side, **_passed_on((chunk,) * 3, shape)})
    return rows


def _passed_on(chunk_shape: Zyx, write_shape: Zyx) -> Json:
    whole = BoundingBox((0, 0, 0), (1024, 1024, 1024))
    plan = make_plan(
        volume=whole,
        roi=whole,
        context=(0, 0, 0),
        patch_shape=(64, 64, 64),
        patch_overlap=(16, 16, 16),
        chunk_shape=chunk_shape,
        crop_margin=(0, 0, 0),
        strategy="exchange",
        chunk_crop_margin=(0, 0, 0),
        block_shape=write_shape,
        halo=(0, 0, 0),
        input_block_shape=(64, 64, 64),
        lattice="stride",
        written=None,
    )
    passed = seam_bytes(plan.totals, 3)
    return {"seam_bytes_per_voxel": round(passed / whole.size, 2)}


if __name__ == "__main__":
    main()
