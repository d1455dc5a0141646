"""Opening a volume: from a URL or a TensorStore spec to voxels with axes, a bounding box and a voxel size."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.volumes.detection import StoredVolume, json_object, neighbours, volume_at
from beam_inference.volumes.kvstores import (
    LOCAL,
    KvStore,
    one_line,
    opened,
    place_of_store,
    with_settings,
)
from beam_inference.volumes.ome_zarr import NM_PER_UNIT, Level
from beam_inference.volumes.volume import Volume, _last_three

logger = logging.getLogger(__name__)


_CHANNEL_LABELS = ("c", "channel", "channels")


_COMPRESSED_SUFFIXES = (".gz", ".br", ".zstd")


def open_volume(
    path: str | None,
    spec: dict[str, Any] | None = None,
    scale: int | VoxelSizeNm = 0,
    channel: list[int] | None = None,
    select: dict[str, int] | None = None,
    storage: Storage = LOCAL,
    cache_bytes: int = 0,
    booleans: bool = False,
) -> Volume:
    """Open a volume for reading, by URL (the driver is detected from what lies there) or by a full TensorStore spec.

    ``scale`` is the index of a scale, 0 the finest, or its voxel size. ``select`` gives positions
    on axes other than z, y, x and channels, by name; an axis of length one needs none. Up to
    ``cache_bytes`` of decoded blocks are kept,
    for whoever reads them next: nobody writes to a job's input while it runs. A volume of truth
        values reads as uint8 if ``booleans``, as masks do; else it is refused.

    Raises:
        VolumeError: nothing readable is there, or it has no z, y, x axes of numbers, or the scale,
            position or channel is absent; also if its block files are compressed in a way
            TensorStore would silently read as zeros.
    """
    volume = open_unread(path, spec, scale, channel, select, storage, cache_bytes, booleans)
    _refuse_compressed_blocks(volume.url, volume.store)
    return volume


def open_unread(
    path: str | None,
    spec: dict[str, Any] | None = None,
    scale: int | VoxelSizeNm = 0,
    channel: list[int] | None = None,
    select: dict[str, int] | None = None,
    storage: Storage = LOCAL,
    cache_bytes: int = 0,
    booleans: bool = False,
) -> Volume:
    """The same for who reads no voxels through it: compressed block files do not matter. Otherwise as open_volume."""
    if spec is None and path is not None and "|" in path:
        spec = _spec_of_url(path)
    level = None
    if spec is None:
        if path is None:
            raise ValueError("give a path or a spec")
        found = volume_at(path, storage)
        if found is None:
            raise VolumeError(
                f"no volume at {path}: expected one of the files info, zarr.json, .zarray or "
                f"attributes.json there. Check input.path{neighbours(path)}."
            )
        chosen = found.scales[_index_of(scale, found, path)]
        spec = chosen.spec
        level = chosen.level
    name = path or f"input.spec ({spec['driver']})"
    try:
        spec = with_settings(spec, storage)
        store = opened(
            lambda context: ts.open(
                spec, open=True, read=True, recheck_cached_data="open", context=context
            ),
            storage,
            cache_bytes,
        )
    except (ValueError, OSError, TypeError) as error:
        raise VolumeError(f"cannot open the volume {name}: {one_line(error)}") from None
    volume = as_volume(name, store, level, select, booleans=booleans)
    return volume if channel is None else _select(volume, channel)


def _index_of(scale: int | VoxelSizeNm, found: StoredVolume, path: str) -> int:
    """Which scale is meant."""
    sizes = [each.voxel_size_nm for each in found.scales]
    if isinstance(scale, int):
        if scale >= len(sizes):
            whole = f", a single {found.driver} array," if sizes == [None] else ""
            raise VolumeError(
                f"{path}{whole} has the scales 0 … {len(sizes) - 1}; input.scale is {scale}"
            )
        return scale
    if sizes == [None]:
        raise VolumeError(
            f"{path} is a single {found.driver} array: it has no scales to choose from, "
            f"input.scale is {list(scale)}"
        )
    for index, size in enumerate(sizes):
        if (
            size is not None
            and None not in size
            and np.allclose(np.array(size, float), scale, rtol=0.01, atol=0)
        ):
            return index
    told = ", ".join(str(list(size)) for size in sizes if size is not None)
    raise VolumeError(
        f"{path} has no scale of {list(scale)} nm (z, y, x), only {told}; see input.scale"
    )


def _spec_of_url(path: str) -> dict[str, Any]:
    """TensorStore's own way to name a driver in a URL, such as ``gs://bucket/em|zarr3:``."""
    try:
        spec: dict[str, Any] = ts.Spec(path).to_json()
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot understand {path}: {one_line(error)}") from None
    return spec


def as_volume(
    url: str,
    store: ts.TensorStore,
    level: Level | None = None,
    select: dict[str, int] | None = None,
    *,
    booleans: bool = False,
) -> Volume:
    """Wrap an open TensorStore, in whatever axis order it is, as a (channel, z, y, x) volume.

    ``level`` is what an OME-Zarr group says of it, ``select`` and ``booleans`` as for
    :func:`open_volume`.

    Raises:
        VolumeError: its axes are not z, y, x and perhaps one of channels, or it does not hold
            numbers.
    """
    driver = str(store.spec().to_json()["driver"])
    labels, units = (
        _axes(url, driver, store) if level is None else (level.axes, level.voxel_size_nm)
    )
    if len(labels) != store.rank:
        raise VolumeError(f"{url} names the axes {labels} of an array that has {store.rank}")
    store, labels, units = _selected(url, store, labels, units, select or {})
    order = _axis_order(url, driver, labels)
    if len(order) == 3:
        czyx = store[ts.d[order].transpose[0, 1, 2]][ts.newaxis]
    else:
        czyx = store[ts.d[order].transpose[0, 1, 2, 3]]
    if booleans and czyx.dtype == ts.bool:
        czyx = ts.cast(czyx, ts.uint8)
    dtype = czyx.dtype.numpy_dtype
    if dtype.kind not in "iufV" or czyx.dtype.name in ("json", "string", "ustring"):
        raise VolumeError(
            f"{url} holds {czyx.dtype.name}; expected integers or floating-point numbers"
        )
    if dtype.isbuiltin != 1:  # bfloat16 and the like, which not every array library knows
        czyx = ts.cast(czyx, ts.float32)
        dtype = np.dtype(np.float32)
    domain = czyx.domain
    block = czyx.chunk_layout.write_chunk.shape
    z, y, x = order[-3:]
    sizes = (units[z], units[y], units[x])
    return Volume(
        url=url,
        place=place_of_store(_kvstore_of(url, store)),
        store=czyx,
        bounds=BoundingBox(_last_three(domain.inclusive_min), _last_three(domain.exclusive_max)),
        channels=domain.shape[0],
        dtype=dtype,
        block_shape=_last_three(block),
        voxel_size_nm=None if None in sizes else sizes,  # type: ignore[arg-type]
    )


def _kvstore_of(url: str, store: ts.TensorStore) -> KvStore:
    if store.kvstore is None:
        raise VolumeError(f"{url} is no volume in a store: it exists in memory only")
    return store.kvstore


def _select(volume: Volume, wanted: list[int]) -> Volume:
    if not wanted or max(wanted) >= volume.channels:
        raise VolumeError(
            f"input.channel is {wanted}, but {volume.url} has the channels 0 … "
            f"{volume.channels - 1}"
        )
    store = volume.store[ts.d[0][wanted]]
    return replace(volume, store=store, channels=len(wanted))


def _axes(url: str, driver: str, store: ts.TensorStore) -> tuple[list[str], list[float | None]]:
    """Names of an array's axes, and its voxel size along each, nm, as far as it says them."""
    attributes = json_object(_kvstore_of(url, store), ".zattrs", url) if driver == "zarr" else {}
    labels = [d.label for d in store.domain]
    # zarr v2 has no place for names and units but its attributes
    names = attributes.get("_ARRAY_DIMENSIONS")
    if not any(labels) and isinstance(names, list) and len(names) == len(labels):
        labels = [str(name) for name in names]
    return labels, _voxel_sizes(url, attributes, store)


def _selected(
    url: str,
    store: ts.TensorStore,
    labels: list[str],
    units: list[float | None],
    select: dict[str, int],
) -> tuple[ts.TensorStore, list[str], list[float | None]]:
    """The array at positions on axes that are neither of space nor of channels, and what is left of its axes."""
    positions = dict(select)
    for label, dimension in zip(labels, store.domain, strict=True):
        if label.lower() not in ("", "z", "y", "x", *_CHANNEL_LABELS) and dimension.size == 1:
            positions.setdefault(label, int(dimension.inclusive_min))
    for label, position in positions.items():
        if label not in labels or label.lower() in ("z", "y", "x"):
            raise VolumeError(
                f"input.select names the axis {label!r}; {url} has {labels}, of which z, y and x "
                "are read whole"
            )
        axis = labels.index(label)
        start = store.domain[axis].inclusive_min
        stop = store.domain[axis].exclusive_max
        if not start <= position < stop:
            raise VolumeError(
                f"input.select is {position} on {label}; {url} has {start} … {stop - 1} there"
            )
        store = store[ts.d[axis][position]]
        labels, units = ([*values[:axis], *values[axis + 1 :]] for values in (labels, units))
    return store, labels, units


def _axis_order(url: str, driver: str, labels: list[str]) -> list[int]:
    """Positions of (channel,) z, y, x among a store's axes."""
    names = ["c" if label.lower() in _CHANNEL_LABELS else label.lower() for label in labels]
    if not any(names):
        fortran = driver == "n5"  # N5 lists its axes x first
        known: dict[int, list[str]] = {3: ["z", "y", "x"], 4: ["c", "z", "y", "x"]}
        names = known.get(len(labels), [])[:: -1 if fortran else 1]
    wanted = ["c", "z", "y", "x"] if "c" in names else ["z", "y", "x"]
    if sorted(names) != sorted(wanted):
        raise VolumeError(
            f"{url} has the axes {labels}; expected z, y, x and at most one of channels. Choose a "
            "position on each other one with input.select, such as {t: 0}; where axes have no "
            "names, with input.spec, a TensorStore spec with a transform."
        )
    return [names.index(name) for name in wanted]


def length_nm(unit: str) -> float | None:
    """A unit of length, by one of its names, in nm; None if it is not known here."""
    return NM_PER_UNIT.get(unit.strip())


def _voxel_sizes(url: str, attributes: dict[str, Any], store: ts.TensorStore) -> list[float | None]:
    """Voxel size of each of the store's own axes in nm, None where it is not known."""
    units: list[ts.Unit | None] = list(store.dimension_units)
    stated = attributes.get("dimension_units")
    if isinstance(stated, list) and len(stated) == len(units):
        units = [ts.Unit(unit) if isinstance(unit, str) else None for unit in stated]
    unknown = sorted(
        {u.base_unit for u in units if u is not None and u.base_unit not in {"", *NM_PER_UNIT}}
    )
    if unknown:
        logger.warning(
            "%s states voxel sizes in %s, which is no length known here",
            url,
            " and ".join(unknown),
        )
    return [
        (
            None
            if unit is None or unit.base_unit not in NM_PER_UNIT
            else unit.multiplier * NM_PER_UNIT[unit.base_unit]
        )
        for unit in units
    ]


def _refuse_compressed_blocks(url: str, store: Any) -> None:
    """Refuse local precomputed volumes whose block files carry a compression suffix, or that have no blocks at all."""
    spec = store.spec().to_json()
    kvstore = store.kvstore.spec().to_json()
    if spec["driver"] != "neuroglancer_precomputed" or kvstore["driver"] != "file":
        return
    folder = Path(kvstore["path"])
    key = spec["scale_metadata"]["key"]
    if not (folder / key).is_dir():
        raise VolumeError(
            f"{url}/info names the scale {key}, but there is no such folder: every voxel would "
            "read as zero"
        )
    with os.scandir(folder / key) as entries:
        for entry in islice(entries, 100_000):
            if entry.name.endswith(_COMPRESSED_SUFFIXES):
                suffix = Path(entry.name).suffix
                raise VolumeError(
                    f"{url}/{key} holds compressed block files such as {entry.name} (as "
                    f"cloud-volume writes them). TensorStore looks for names without {suffix} and "
                    "would read every voxel as zero. Decompress them in place (gunzip -r, for "
                    ".gz), or serve the folder over HTTP with Content-Encoding set."
                )
