"""Opening a volume for reading, by URL or by a TensorStore spec."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Origin
from beam_inference.geometry.zyx import VoxelSizeNm, triple
from beam_inference.volumes.axes import Axes, read_axes, take_positions
from beam_inference.volumes.block_files import block_with_suffix, sample_block_keys, unread_suffix
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.block_names import check_block_names
from beam_inference.volumes.detection import (
    Scale,
    StoredVolume,
    hint_at_neighbours,
    json_object,
    volume_at,
)
from beam_inference.volumes.folders import list_keys
from beam_inference.volumes.kvstores import (
    LOCAL,
    PATIENCE_SECONDS,
    KvStore,
    one_line,
    open_with,
    place_of_store,
    read_key,
    status,
    url_of,
    with_settings,
)
from beam_inference.volumes.ome_zarr import GroupScale
from beam_inference.volumes.packed_blocks import PACKED_SUFFIXES, PackedVolume, open_packed
from beam_inference.volumes.views import view_of
from beam_inference.volumes.volume import Volume, extents
from beam_inference.volumes.zarr2_records import check_records

logger = logging.getLogger(__name__)

_MOST_FILES = 100_000
"""Block files whose names are looked at for suffixes."""


def open_volume(
    url: str,
    *,
    scale: int | VoxelSizeNm = 0,
    channel: Sequence[int] | None = None,
    select: Mapping[str, int] | None = None,
    storage: Storage = LOCAL,
) -> Volume:
    """Open a volume for reading; its format is found by what lies there.

    Args:
        url: a URL, or the path of a local folder.
        scale: which scale of a multiscale volume: its index, 0 the finest, or its voxel size, ZYX,
            in nanometres.
        channel: numbers of the channels to read; default all.
        select: positions on axes other than z, y, x and channels, by name; an axis of length one
            needs none.
        storage: how object stores are reached.

    Returns:
        The volume, axes (channel, z, y, x).

    Raises:
        VolumeError: as for :func:`open_source`.
    """
    path = url if "://" in url or "|" in url else url_of(url)
    return open_source(VolumeSource(path, None, scale, channel, select or {}, storage))


def open_source(
    source: VolumeSource,
    *,
    cache_bytes: int = 0,
    booleans: bool = False,
    check_blocks: bool = True,
) -> Volume:
    """Open a volume for reading.

    Args:
        source: which volume, and what of it.
        cache_bytes: decoded blocks that are kept for whoever reads them next; for volumes that
            nobody writes to meanwhile.
        booleans: whether a volume of truth values is read as uint8, as masks are; else it is
            refused.
        check_blocks: whether to refuse local block files that are compressed, or named, in a way
            which TensorStore would silently read as zeros; not needed where no voxels are read.

    Returns:
        The volume, axes (channel, z, y, x).

    Raises:
        VolumeError: nothing readable is there, or it has no z, y, x axes of numbers, or the scale,
            position or channel is absent.
    """
    scale = _find_scale(source)
    name = source.path or f"input.spec ({scale.spec['driver']})"
    try:
        spec = with_settings(scale.spec, source.storage)
        check_records(spec, name, source.storage)
        _check_local_metadata(spec, name)
        store = _open_array(spec, source.storage, cache_bytes)
    except (ValueError, OSError, TypeError) as error:
        raise VolumeError(f"cannot open the volume {name}: {_explain(error)}") from None
    volume = as_volume(name, store, scale.group_scale, source.select, booleans=booleans)
    if source.channel is not None:
        volume = _take_channels(volume, source.channel)
    _check_scale_key(volume)
    if check_blocks:
        volume = _open_packed_blocks(volume, source.storage, cache_bytes)
        suffixes = PACKED_SUFFIXES if isinstance(volume, PackedVolume) else ()
        check_block_names(name, volume.stored_spec, suffixes)
    return volume


def _open_array(spec: Json, storage: Storage, cache_bytes: int) -> ts.TensorStore:
    """Open an array, with blocks that are kept for all that open it, if it is the same still.

    Raises:
        ValueError, OSError, TypeError: as TensorStore does.
    """

    def open_it(context: ts.Context) -> ts.Future[ts.TensorStore]:
        return ts.open(spec, open=True, read=True, recheck_cached_data="open", context=context)

    store = open_with(open_it, storage)
    if not cache_bytes:
        return store
    keeping = open_with(open_it, storage, cache_bytes)
    is_same = (keeping.domain, keeping.dimension_units) == (store.domain, store.dimension_units)
    return keeping if is_same else store


def _check_local_metadata(spec: Json, name: str) -> None:
    """Refuse a pipe in place of an array's metadata, on which TensorStore would wait for ever.

    Raises:
        VolumeError: there is one.
        ValueError, OSError: as TensorStore, which cannot open its key-value store.
    """
    if spec.get("driver") == "zarr3" and "kvstore" in spec:
        kvstore = ts.KvStore.Spec(spec["kvstore"])
        if kvstore.to_json()["driver"] == "file":
            read_key(ts.KvStore.open(kvstore).result(), "zarr.json", name)


_ENCODING = re.compile(r'member "encoding": Expected one of (.+), but received: "([^"]*)"')
_CLOUD_VOLUME_CODECS = {
    "compresso": "compresso",
    "crackle": "crackle-codec",
    "fpzip": "fpzip",
    "jxl": "imagecodecs",
    "kempressed": "fpzip",
    "zfpc": "zfpc",
}
"""Packages that cloud-volume encodes blocks with. Their decoders may crash on damaged blocks."""
_CODEC = re.compile(r'member "(?:codecs|compressor|filters)".*"([^"]*)" is not registered')


def _explain(error: Exception) -> str:
    """Why a volume cannot be opened: what it is encoded with, if that is unknown here."""
    text = one_line(error)
    if "filters are not supported" in text:
        return (
            "its blocks are encoded with filters of zarr v2, which cannot be read. Copy the volume "
            "into an array without filters first, with zarr-python"
        )
    encoding = _ENCODING.search(text)
    codec = _CODEC.search(text)
    if encoding is None and codec is None:
        return text
    name = (encoding[2] if encoding else codec[1] if codec else "") or "an encoding without a name"
    readable = f"; readable are {encoding[1]}" if encoding else ""
    package = _CLOUD_VOLUME_CODECS.get(name) if encoding else None
    if package is not None:
        return (
            f"its blocks are encoded with {name}, which cannot be read{readable}. Copy the volume "
            f"into raw blocks first: pip install cloud-volume {package}, and python -c 'from "
            f'cloudvolume import CloudVolume; volume = CloudVolume("file:///IN"); '
            f'volume.transfer_to("file:///OUT", volume.bounds, encoding="raw")\''
        )
    return (
        f"its blocks are encoded with {name}, which cannot be read{readable}. Copy the volume "
        f"into another encoding first, with the software that wrote it or another that reads it"
    )


def _find_scale(source: VolumeSource) -> Scale:
    if source.spec is not None:
        return Scale(source.spec, None, None)
    if source.path is None:
        raise ValueError("give a path or a spec")
    if "|" in source.path:
        return Scale(_spec_of_url(source.path), None, None)
    stored = volume_at(source.path, source.storage)
    if stored is None:
        raise VolumeError(
            f"no volume at {source.path}: expected one of the files info, zarr.json, .zarray or "
            f"attributes.json there. Check the path{hint_at_neighbours(source.path)}."
        )
    return stored.scales[_index_of(source.scale, stored, source.path)]


def _index_of(scale: int | VoxelSizeNm, stored: StoredVolume, path: str) -> int:
    sizes = [each.voxel_size_nm for each in stored.scales]
    if isinstance(scale, int):
        if scale >= len(sizes):
            whole = f", a single {stored.driver} array," if sizes == [None] else ""
            raise VolumeError(
                f"{path}{whole} has the scales 0 … {len(sizes) - 1}, and scale {scale} is asked for"
            )
        return scale
    if sizes == [None]:
        raise VolumeError(
            f"{path} is a single {stored.driver} array: it has no scales to choose from, "
            f"and one of {list(scale)} nm is asked for"
        )
    for index, size in enumerate(sizes):
        if (
            size is not None
            and None not in size
            and np.allclose(np.array(size, float), scale, rtol=0.01, atol=0)
        ):
            return index
    available = ", ".join(str(list(size)) for size in sizes if size is not None)
    raise VolumeError(f"{path} has no scale of {list(scale)} nm (z, y, x), only {available}")


def _spec_of_url(path: str) -> Json:
    """TensorStore's own way to name a driver in a URL, such as ``gs://bucket/em|zarr3:``."""
    try:
        spec: Json = ts.Spec(path).to_json()
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot understand {path}: {one_line(error)}") from None
    return spec


def as_volume(
    url: str,
    store: ts.TensorStore,
    group_scale: GroupScale | None = None,
    select: Mapping[str, int] | None = None,
    *,
    booleans: bool = False,
) -> Volume:
    """Wrap an open TensorStore, in whatever axis order it is, as a (channel, z, y, x) volume.

    Args:
        url: where it lies, for messages.
        store: the array.
        group_scale: entry of an OME-Zarr group that describes it; None if it describes itself.
        select: as for :func:`open_volume`.
        booleans: as for :func:`open_source`.

    Raises:
        VolumeError: its axes are not z, y, x and perhaps one of channels, or it does not hold
            numbers.
    """
    view = view_of(store)
    driver = str(view.stored["driver"])
    kvstore = _kvstore_of(url, store)
    _check_blocks(url, store)
    if group_scale is None:
        attributes = json_object(kvstore, ".zattrs", url) if driver == "zarr" else {}
        axes = read_axes(url, store, view, attributes)
    else:
        axes = Axes(group_scale.axes, group_scale.voxel_size_nm)
        _check_order(url, store, axes.labels)
    if len(axes.labels) != store.rank:
        raise VolumeError(f"{url} names the axes {axes.labels} of an array that has {store.rank}")
    store, axes = take_positions(url, store, axes, select or {})
    order = axes.order(url, driver)
    if len(order) == 3:
        czyx = store[ts.d[order].transpose[0, 1, 2]][ts.newaxis]
    else:
        czyx = store[ts.d[order].transpose[0, 1, 2, 3]]
    czyx = _as_numbers(url, czyx, booleans=booleans)
    domain = czyx.domain
    bounds = BoundingBox(triple(domain.inclusive_min[1:]), triple(domain.exclusive_max[1:]))
    if not bounds.size * domain.shape[0]:
        raise VolumeError(
            f"{url} has no voxels: it has the shape {[domain.shape[0], *bounds.shape]} (channels, "
            "z, y, x)"
        )
    z, y, x = (axes.sizes_nm[axis] for axis in order[-3:])
    volume = Volume(
        url=url,
        place=place_of_store(kvstore),
        store=czyx,
        bounds=bounds,
        channels=domain.shape[0],
        dtype=czyx.dtype.numpy_dtype,
        block_shape=extents(czyx.chunk_layout.write_chunk.shape),
        voxel_size_nm=_as_voxel_size(z, y, x),
    )
    if group_scale is None:
        return volume
    tell_rest(url, group_scale.origin)
    return volume.place_at(group_scale.origin)


def _check_order(url: str, store: ts.TensorStore, labels: list[str]) -> None:
    """Refuse an array of a group that states the group's axes in another order itself."""
    own = [dimension.label.lower() for dimension in store.domain]
    named = [label.lower() for label in labels]
    if own != named and sorted(own) == sorted(named):
        raise VolumeError(
            f"{url} lists the axes {named}, and its array itself names them {own}: one of them is "
            "wrong. Correct it; or open the array by its own path, to read it as it says itself."
        )


def _as_voxel_size(*sizes_nm: float | None) -> VoxelSizeNm | None:
    """A voxel size, ZYX; None where an axis has none, or one that is no length."""
    z, y, x = (size if size is not None and 0 < size < math.inf else None for size in sizes_nm)
    return None if z is None or y is None or x is None else (z, y, x)


def _check_blocks(url: str, store: ts.TensorStore) -> None:
    """Refuse an array of blocks that no machine, or not this one, can hold."""
    try:
        shape = store.chunk_layout.read_chunk.shape or ()
    except ValueError as error:
        raise VolumeError(f"{url} states blocks that no array has: {one_line(error)}") from None
    check_block_memory(url, shape, store.dtype.numpy_dtype.itemsize)


@cache
def tell_rest(url: str, origin: Origin) -> None:
    """Warn once in a process of a volume that begins between voxels.

    Args:
        url: of the volume, or words for it.
        origin: where it begins.
    """
    if any(origin.rest):
        logger.warning(
            "%s begins between voxels, %s of a voxel beyond %s (z, y, x), and is taken to begin "
            "there. An output in OME-Zarr keeps the rest; others cannot",
            url,
            [float(f"{part:.3g}") for part in origin.rest],
            list(origin.voxel),
        )


def tell_rest_of_voxels(url: str, voxel_size_nm: VoxelSizeNm, origin: Origin) -> None:
    """Warn as :func:`tell_rest` does, of a volume in voxels of another size than it is stored in.

    Args:
        url: of the volume.
        voxel_size_nm: of the voxels, ZYX.
        origin: where they begin.
    """
    sizes = [float(f"{extent:g}") for extent in voxel_size_nm]
    tell_rest(f"{url} in voxels of {sizes} nm", origin)


def _as_numbers(url: str, store: ts.TensorStore, *, booleans: bool) -> ts.TensorStore:
    """The array in a dtype that every array library knows."""
    if booleans and store.dtype == ts.bool:
        store = ts.cast(store, ts.uint8)
    dtype = store.dtype.numpy_dtype
    if dtype.kind not in "iufV" or store.dtype.name in ("json", "string", "ustring"):
        raise VolumeError(
            f"{url} holds {store.dtype.name}; expected integers or floating-point numbers"
        )
    if dtype.isbuiltin == 1:
        return store
    is_integer = store.dtype.name in ("int2", "int4")
    return ts.cast(store, ts.int8 if is_integer else ts.float32)  # floats of 8 bits, bfloat16


def _kvstore_of(url: str, store: ts.TensorStore) -> KvStore:
    if store.kvstore is None:
        raise VolumeError(f"{url} is not stored anywhere: it exists in memory only")
    spec = store.kvstore.spec().to_json()
    while isinstance(spec, dict):
        if spec.get("driver") == "zip":
            raise VolumeError(
                f"{url} is in a zip file, in which TensorStore takes members that it cannot unpack "
                "for absent: they would read as zeros. Unpack it first."
            )
        spec = spec.get("base")
    return store.kvstore


def _take_channels(volume: Volume, channels: Sequence[int]) -> Volume:
    if not channels or max(channels) >= volume.channels:
        raise VolumeError(
            f"the channels {list(channels)} are asked for, but {volume.url} has the channels "
            f"0 … {volume.channels - 1}"
        )
    store = volume.store[ts.d[0][list(channels)]]
    return replace(volume, store=store, channels=len(channels))


def _check_scale_key(volume: Volume) -> None:
    """Refuse a precomputed scale whose blocks lie anywhere but in the volume's folder."""
    scale = volume.precomputed_scale
    if scale is None:
        return
    parts = str(scale["key"]).split("/")
    if {"", ".", ".."}.intersection(parts):
        raise VolumeError(
            f"{volume.url}/info names the scale {scale['key']!r}, which is no path inside of the "
            "volume's folder: blocks from elsewhere are not read in its place"
        )


def _open_packed_blocks(volume: Volume, storage: Storage, cache_bytes: int) -> Volume:
    """Read block files that cloud-volume has packed; refuse those of other names, or of none.

    Returns:
        The volume, if TensorStore finds its blocks; else one that unpacks them.
    """
    scale = volume.precomputed_scale
    kvstore = volume.kvstore.spec().to_json()
    is_local = kvstore["driver"] == "file"
    name = None
    if is_local and scale is not None:
        name = _local_block_of_other_name(volume, scale, kvstore)
    elif not is_local:
        name = _remote_block_of_other_name(volume, storage)
    if scale is None:
        return volume
    suffix = None if name is None else unread_suffix(name)
    if is_local and suffix in PACKED_SUFFIXES and not scale.get("sharding"):
        return open_packed(volume, Path(kvstore["path"]), suffix, cache_bytes)
    if name is not None:
        raise VolumeError(
            f"{volume.url}/{scale['key']} holds compressed block files such as {name}. TensorStore "
            f"looks for names without {suffix} and would read every voxel as zero. Unpacked on the "
            "fly are blocks of local volumes that are not sharded, with "
            f"{', '.join(PACKED_SUFFIXES)}. Decompress others in place (and take the suffix from "
            "the names), copy the volume to a local folder, or serve it over HTTP with "
            "Content-Encoding set."
        )
    return volume


def _local_block_of_other_name(volume: Volume, scale: Json, kvstore: Json) -> str | None:
    folder = Path(kvstore["path"])
    key = str(scale["key"])
    if not os.path.isdir(folder / key):  # no error of a name that no folder can have
        raise VolumeError(
            f"{volume.url}/info names the scale {key!r}, but there is no such folder: every voxel "
            "would read as zero"
        )
    try:
        return block_with_suffix(folder / key, _MOST_FILES)
    except OSError as error:
        raise VolumeError(
            f"the folder {folder / key} cannot be listed: {error.strerror or error}. It is looked "
            "through for blocks whose names end otherwise, which would read as zeros: allow this "
            "user to read it"
        ) from None


def _sample_keys(volume: Volume) -> list[str]:
    """Keys of the first, a middle and the last block of a volume, or shard."""
    domain = volume.store.domain
    samples = []
    for share in (0, 1, 2):
        voxel = (
            start + (n - 1) * share // 2
            for start, n in zip(domain.inclusive_min, domain.shape, strict=True)
        )
        window = volume.store[tuple(slice(at, at + 1) for at in voxel)]
        samples.append(volume.view.stored_spans(window))
    return sample_block_keys(volume.stored_spec, samples)


def _is_sharded(volume: Volume) -> bool:
    layout = volume.store.chunk_layout
    return layout.read_chunk.shape != layout.write_chunk.shape


_SECONDS_TO_ASK = 2.0
"""What a web server's answer to the question whether a block is there may take."""


def _absent_blocks(volume: Volume, keys: Sequence[str]) -> list[str]:
    """Those of some blocks that a store does not have; none where it takes its time to say.

    Of blocks in buckets, and of shards, which may be large, a byte is asked for.
    """
    is_web = volume.kvstore.spec().to_json()["driver"] == "http"
    part = None if is_web and not _is_sharded(volume) else slice(0, 1)
    patience = _SECONDS_TO_ASK if is_web else PATIENCE_SECONDS
    requests = {key: volume.kvstore.read(key, byte_range=part) for key in keys}
    try:
        return [key for key, request in requests.items() if _is_absent(request, patience)]
    except (ValueError, OSError):
        return []  # reading says what is wrong


def _is_absent(request: ts.Future[KvStore.ReadResult], patience: float) -> bool:
    """Whether a block is not there, or a shard without a byte."""
    try:
        return request.result(timeout=patience).state == "missing"
    except ValueError as error:
        if status(error) != "OUT_OF_RANGE":
            raise
        return True


def _remote_block_of_other_name(volume: Volume, storage: Storage) -> str | None:
    """Look for the first, a middle and the last block, and for names with a suffix where they lack.

    Where none of the three is there, that is told.
    """
    keys = _sample_keys(volume)
    absent = _absent_blocks(volume, keys)
    scale = volume.precomputed_scale
    name = None
    if scale is not None and not scale.get("sharding"):
        name = _name_by_listing(volume, storage, absent)
    if name is None and keys and len(absent) == len(keys):
        logger.warning(
            "%s has none of its first, middle and last block: absent blocks read as zeros, or as "
            "its fill value",
            volume.url,
        )
    return name


def _name_by_listing(volume: Volume, storage: Storage, absent: Sequence[str]) -> str | None:
    """The name of a block with a suffix in place of one that is absent."""
    for key in absent:
        names = ts.KvStore.KeyRange(key, f"{key}/")  # "/" comes after "."
        try:
            listed = list_keys(volume.kvstore, storage, names)
        except (NotImplementedError, ValueError, OSError):
            return _name_by_asking(volume, absent)  # who may read a store need not list it
        for each in listed:
            name = each.decode(errors="replace").rpartition("/")[2]
            if unread_suffix(name) is not None:
                return name
    return None


def _name_by_asking(volume: Volume, absent: Sequence[str]) -> str | None:
    """As :func:`_name_by_listing` where a store cannot be listed, as by HTTP."""
    try:
        for key, suffix in product(absent, PACKED_SUFFIXES):
            found = volume.kvstore.read(f"{key}{suffix}").result(timeout=_SECONDS_TO_ASK)
            if found.state != "missing":
                return f"{key.rpartition('/')[2]}{suffix}"
    except (ValueError, OSError):
        return None
    return None
