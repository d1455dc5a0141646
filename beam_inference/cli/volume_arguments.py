"""What the commands on volumes take, those that need no job."""

from __future__ import annotations

import argparse

from beam_inference.cli import volume_commands as commands
from beam_inference.cli.argument_types import (
    Subparsers,
    add_command,
    add_logging,
    channels,
    natural,
    offset,
    positive,
    shape,
    sizes,
)


def add_volume_commands(subparsers: Subparsers) -> None:
    """Each with its flags."""
    _add_convert(subparsers)
    _add_levels(subparsers)
    _add_pyramid(subparsers)
    _add_thumbnail(subparsers)
    _add_components(subparsers)
    _add_segment(subparsers)


def _add_pyramid(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "pyramid",
        "make coarser levels of a volume",
        "gs://bucket/em --dry-run",
        "segmentation --method=mode --factor=1x2x2 --levels=3",
        description=(
            "Make coarser levels of a volume, or what is missing of them. Any flag of Apache Beam "
            "may follow."
        ),
    )
    parser.add_argument(
        "volume", metavar="VOLUME", help="a precomputed volume or OME-Zarr group, a path or URL"
    )
    parser.add_argument(
        "--method",
        choices=("mean", "mode"),
        help=(
            "mean for images and maps, mode for labels (default: mode if the volume says it is a "
            "segmentation)"
        ),
    )
    parser.add_argument(
        "--factor",
        type=shape,
        metavar="ZxYxX",
        help="from level to level (default: until isotropic 1x2x2, say, then 2x2x2)",
    )
    parser.add_argument(
        "--levels",
        type=positive,
        metavar="N",
        help="how many (default: until one block holds the volume)",
    )
    parser.add_argument(
        "--scale",
        type=natural,
        default=0,
        metavar="N",
        help="made from this one (default: 0, the finest)",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="tell what would be made; write nothing",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove such levels, and make them anew"
    )
    add_logging(parser)
    parser.set_defaults(command=commands.pyramid, takes_beam_flags=True)


def _add_thumbnail(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "thumbnail",
        "draw planes of a coarse level",
        "gs://bucket/affinities --to affinities.png",
    )
    parser.add_argument("volume", metavar="VOLUME", help="a volume, a path or URL")
    parser.add_argument(
        "--to", default="thumbnail.png", metavar="FILE.PNG", help="(default: thumbnail.png)"
    )
    parser.add_argument(
        "--planes", type=positive, default=16, metavar="N", help="at most (default: 16)"
    )
    add_logging(parser)
    parser.set_defaults(command=commands.thumbnail)


def _add_components(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "components",
        "connected components of a map or a segmentation, exact across chunks",
        "boundaries objects --threshold 0.5 --min-size 100",
        "gs://bucket/labels gs://bucket/parts --multilabel --runner=DataflowRunner",
        description=(
            "Label the connected components of a volume, as if all of it were in memory. Any flag "
            "of Apache Beam may follow."
        ),
    )
    parser.add_argument("source", metavar="IN", help="the volume to read, a path or URL")
    parser.add_argument("target", metavar="OUT", help="the segmentation to write, a path or URL")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--threshold",
        type=float,
        metavar="T",
        help="voxels of T or more, in stored units, are foreground",
    )
    what.add_argument(
        "--multilabel",
        action="store_true",
        help="IN is a segmentation: touching voxels of equal label are one; 0 is none",
    )
    parser.add_argument(
        "--channel", type=natural, metavar="C", help="of IN; needed where it has several"
    )
    parser.add_argument(
        "--connectivity",
        type=int,
        choices=(6, 18, 26),
        default=6,
        help="voxels touch by faces, edges, corners (default: 6)",
    )
    _add_labels(parser, "components", 256)
    parser.set_defaults(command=commands.components, takes_beam_flags=True)


def _add_segment(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "segment",
        "objects of a map of affinities: watershed and mean-affinity agglomeration, exact across "
        "chunks",
        "affinities objects --threshold 0.6 --low 0.1 --high 0.99",
        "gs://bucket/affinities gs://bucket/objects --threshold 128 --low 25 --high 253 --channels "
        "2,1,0 --runner=DataflowRunner",
        description=(
            "Segment a volume of affinities, as if all of it were in memory. Affinities are given "
            "in stored units: 0 to 1, or 0 to 255 where they are stored as bytes. Any flag of "
            "Apache Beam may follow."
        ),
    )
    parser.add_argument("source", metavar="IN", help="the affinities, a path or URL")
    parser.add_argument("target", metavar="OUT", help="the segmentation to write, a path or URL")
    parser.add_argument(
        "--threshold",
        type=float,
        required=True,
        metavar="T",
        help="fragments are joined while their mean affinity is T or more",
    )
    parser.add_argument(
        "--low", type=float, required=True, metavar="T", help="less affine voxels are not joined"
    )
    parser.add_argument(
        "--high", type=float, required=True, metavar="T", help="voxels so affine always are"
    )
    parser.add_argument(
        "--channels",
        type=channels,
        default=(0, 1, 2),
        metavar="Z,Y,X",
        help="of IN: the affinities along z, y and x (default: 0,1,2)",
    )
    parser.add_argument(
        "--to-next",
        "--to_next",
        action="store_true",
        help="a voxel's affinities are with the next voxels (default: with the ones before)",
    )
    _add_labels(parser, "segments", 128)
    parser.set_defaults(command=commands.segment, takes_beam_flags=True)


def _add_labels(parser: argparse.ArgumentParser, what: str, side: int) -> None:
    parser.add_argument(
        "--scale", type=natural, default=0, metavar="S", help="of a precomputed IN (default: 0)"
    )
    parser.add_argument(
        "--min-size",
        "--min_size",
        type=positive,
        default=1,
        metavar="N",
        help=f"{what} of fewer voxels are removed",
    )
    parser.add_argument(
        "--format",
        choices=("precomputed", "zarr3", "zarr2", "ome_zarr", "n5"),
        default="precomputed",
        help="of OUT (default: precomputed, compressed as a segmentation)",
    )
    parser.add_argument(
        "--chunk_shape",
        "--chunk-shape",
        type=shape,
        metavar="ZxYxX",
        help=f"done at once (default: some {side} on a side)",
    )
    parser.add_argument(
        "--block_shape",
        "--block-shape",
        type=shape,
        metavar="ZxYxX",
        help="of OUT (default: as IN's)",
    )
    parser.add_argument(
        "--shard_shape",
        "--shard-shape",
        type=shape,
        metavar="ZxYxX",
        help="of OUT: many blocks in a file (default: none)",
    )
    parser.add_argument(
        "--pyramid", action="store_true", help="then make coarser levels of OUT, by mode"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="forget what was done for OUT; make everything anew",
    )
    add_logging(parser)


def _add_levels(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "levels",
        "count a volume's values, to normalise by them",
        "gs://bucket/em --to levels.json",
        description=(
            "Count a volume's values, of the whole and of each section along z, and write "
            "quantiles, mean and standard deviation to a file, by which model.normalize: {levels: "
            "FILE} of a job normalises. Any flag of Apache Beam may follow."
        ),
    )
    parser.add_argument("volume", metavar="VOLUME", help="a path or URL")
    parser.add_argument(
        "--to", required=True, metavar="FILE.JSON", help="the file to write, a path or URL"
    )
    parser.add_argument(
        "--scale", type=int, default=0, metavar="N", help="of a multiscale volume (default: 0)"
    )
    parser.add_argument(
        "--channel", type=int, action="append", metavar="C", help="only this one; repeatable"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="count anew, where the volume was changed"
    )
    add_logging(parser)
    parser.set_defaults(command=commands.levels, takes_beam_flags=True)


def _add_convert(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "convert",
        "convert a volume from one format into another",
        "'slices/*.png' em --voxel-size 40,4,4",
        "gs://bucket/em em.h5:raw --scale 2",
        description=(
            "Convert a volume: stacks of slices, TIFF, HDF5, NIfTI, NRRD, MRC, npy, precomputed, "
            "zarr, N5; into volumes of blocks as a Beam job, whose flags may follow. Given again, "
            "one that was killed goes on."
        ),
    )
    parser.add_argument(
        "source",
        metavar="IN",
        help="a file, a folder or a quoted glob of slices, or a volume's URL",
    )
    parser.add_argument(
        "target", metavar="OUT", help="a path or URL; a file where its name ends with .tif, .h5, …"
    )
    parser.add_argument(
        "--format", metavar="NAME", help="of OUT; default by its name, else precomputed"
    )
    parser.add_argument("--dataset", metavar="NAME", help="which one of IN, where it holds several")
    parser.add_argument(
        "--scale", type=natural, default=0, metavar="N", help="of an IN with several (default: 0)"
    )
    parser.add_argument(
        "--block_shape",
        "--block-shape",
        type=shape,
        metavar="Z,Y,X",
        help="of blocks (default: some 64³)",
    )
    parser.add_argument(
        "--shard_shape", "--shard-shape", type=shape, metavar="Z,Y,X", help="a file of many blocks"
    )
    parser.add_argument(
        "--encoding", metavar="NAME", help="of precomputed blocks: raw, png, jpeg, …"
    )
    parser.add_argument(
        "--labels",
        action="store_true",
        help="values are names of objects, for precomputed's readers",
    )
    parser.add_argument(
        "--voxel-size",
        "--voxel_size",
        type=sizes,
        metavar="Z,Y,X",
        help="in nm, instead of what IN says",
    )
    parser.add_argument(
        "--offset", type=offset, metavar="Z,Y,X", help="of the first voxel; write --offset=-1,0,0"
    )
    parser.add_argument(
        "--drop", default="", metavar="WHAT", help="what may be lost: offset, voxel-size, or both"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is at OUT; do every chunk anew"
    )
    add_logging(parser)
    parser.set_defaults(command=commands.convert, takes_beam_flags=True)
