"""The formats ``ome_zarr`` (version 0.5) and ``ome_zarr_0.4``: groups of Zarr arrays.

Specification: https://ngff.openmicroscopy.org, "multiscales" metadata.
"""

from __future__ import annotations

from beam_inference.config.fields import Json
from beam_inference.config.formats import Format, OutputSpec
from beam_inference.volumes import ome_zarr
from beam_inference.volumes.formats.zarr import zarr2_attributes, zarr2_metadata, zarr3_metadata
from beam_inference.volumes.provenance import in_attributes

_FINEST = "0"
"""Path of the finest array in a group."""


def _attributes(spec: OutputSpec, version: str) -> Json:
    name = spec.url.rstrip("/").rpartition("/")[2]
    translation = ome_zarr.translation_nm(spec.bounds.start, spec.voxel_size_nm, spec.rest)
    scales = [(_FINEST, spec.voxel_size_nm, translation)]
    return ome_zarr.attributes(
        version, name, scales, labels=spec.labels, has_channels="c" in spec.axes
    )


def _zarr3_group(spec: OutputSpec) -> dict[str, Json]:
    group = {"zarr_format": 3, "node_type": "group", "attributes": _attributes(spec, "0.5")}
    return {"zarr.json": group}


def _zarr2_group(spec: OutputSpec) -> dict[str, Json]:
    return {".zattrs": _attributes(spec, "0.4"), ".zgroup": {"zarr_format": 2}}


OME_ZARR = Format(
    name="ome_zarr",
    driver="zarr3",
    group="ome_zarr",
    metadata=zarr3_metadata,
    markers=("zarr.json",),
    array_path=_FINEST,
    group_files=_zarr3_group,
    is_multiscale=True,
    has_offset=True,
    has_shards=True,
    viewer="zarr3",
    provenance=in_attributes("zarr.json", "attributes"),
)

OME_ZARR_0_4 = Format(
    name="ome_zarr_0.4",
    driver="zarr",
    group="ome_zarr_0.4",
    metadata=zarr2_metadata,
    markers=(".zgroup",),
    array_path=_FINEST,
    array_files=lambda spec: {f"{_FINEST}/.zattrs": zarr2_attributes(spec)},
    group_files=_zarr2_group,
    is_multiscale=True,
    has_offset=True,
    viewer="zarr2",
    provenance=in_attributes(".zattrs"),
)
