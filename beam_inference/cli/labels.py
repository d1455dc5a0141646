"""The commands that make a segmentation from a volume: ``components`` and ``segment``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from beam_inference.cli.argument_types import channels, exact_number, natural, positive, shape
from beam_inference.cli.command import (
    PipelineOptions,
    Subparsers,
    add_command,
    add_json,
    add_logging,
    set_action,
)
from beam_inference.cli.terminal import print_to_stderr
from beam_inference.config.fields import Json
from beam_inference.config.plugins import list_plugins
from beam_inference.environment import format_bytes
from beam_inference.errors import COMPLETE
from beam_inference.geometry.zyx import Zyx

if TYPE_CHECKING:
    from beam_inference.segmentation.make_labels import LabelResult
    from beam_inference.segmentation.plans import LabelPlan
    from beam_inference.segmentation.series import Series


@dataclass(frozen=True)
class LabelOptions(PipelineOptions):
    """Options of both commands."""

    source: str
    target: str
    scale: int
    min_size: int
    format: str
    chunk_shape: Zyx | None
    block_shape: Zyx | None
    shard_shape: Zyx | None
    pyramid: bool
    overwrite: bool
    json: bool


@dataclass(frozen=True)
class ComponentsOptions(LabelOptions):
    """Options of ``components``; ``multilabel`` is ``threshold=None``."""

    threshold: float | None
    channel: int | None
    connectivity: int


@dataclass(frozen=True)
class SegmentOptions(LabelOptions):
    """Options of ``segment``; several thresholds give a volume each."""

    threshold: Sequence[float]
    low: float
    high: float
    channels: Zyx
    to_next: bool


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_components(subparsers)
    _add_segment(subparsers)


def _add_components(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "components",
        "label the connected components of a map or a segmentation, exact across chunks",
        "boundaries objects --threshold 128 --min-size 100",
        "gs://bucket/labels gs://bucket/parts --multilabel --runner=DataflowRunner",
        description=(
            "Label the connected components of a volume, as if all of it were in memory. The "
            "first example is for a map of uint8; --threshold 0.5 is for one of floats from 0 to "
            "1. Any flag of Apache Beam may follow."
        ),
    )
    parser.add_argument("source", metavar="IN", help="the volume to read, a path or URL")
    parser.add_argument("target", metavar="OUT", help="the segmentation to write, a path or URL")
    foreground = parser.add_mutually_exclusive_group(required=True)
    foreground.add_argument(
        "--threshold",
        type=exact_number,
        metavar="T",
        help=(
            "foreground is every voxel of at least T, in the stored units of IN, such as 1 to 255 "
            "for uint8"
        ),
    )
    foreground.add_argument(
        "--multilabel",
        action="store_true",
        help=(
            "IN is a segmentation: touching voxels of the same label are one component; 0 is "
            "background"
        ),
    )
    parser.add_argument(
        "--channel", type=natural, metavar="C", help="channel of IN; required if it has several"
    )
    parser.add_argument(
        "--connectivity",
        type=int,
        choices=(6, 18, 26),
        default=6,
        help="voxels touch by faces (6), edges too (18), or corners too (26) (default: 6)",
    )
    _add_label_arguments(parser, "components", chunk_side=256)
    set_action(parser, ComponentsOptions, components, takes_beam_flags=True)


def _add_segment(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "segment",
        "segment a map of affinities: watershed and mean-affinity agglomeration, exact across "
        "chunks",
        "affinities objects --threshold 153 --low 26 --high 253",
        "gs://bucket/floats gs://bucket/objects --threshold 0.6 --low 0.1 --high 0.99 --channels "
        "2,1,0 --runner=DataflowRunner",
        "affinities candidates --threshold 128 --threshold 153 --threshold 178 --low 26 --high 253",
        description=(
            "Segment a volume of affinities, as if all of it were in memory. The three thresholds "
            "are in the stored units of IN: from 0 to 255 where it holds uint8, from 0 to 1 where "
            "it holds such floats; the examples show both. Any flag of Apache Beam may follow."
        ),
    )
    parser.add_argument("source", metavar="IN", help="the affinities, a path or URL")
    parser.add_argument("target", metavar="OUT", help="the segmentation to write, a path or URL")
    parser.add_argument(
        "--threshold",
        type=float,
        action="append",
        required=True,
        metavar="T",
        help=(
            "merge fragments while their mean affinity is at least T, in stored units; given "
            "again, OUT is a folder with a volume threshold_T for each, from one watershed"
        ),
    )
    parser.add_argument(
        "--low",
        type=float,
        required=True,
        metavar="T",
        help="never join two voxels of a lower affinity, in stored units",
    )
    parser.add_argument(
        "--high",
        type=float,
        required=True,
        metavar="T",
        help="always join two voxels of this affinity or more, in stored units",
    )
    parser.add_argument(
        "--channels",
        type=channels,
        default=(0, 1, 2),
        metavar="Z,Y,X",
        help="channels of IN that hold the affinities along z, y and x (default: 0,1,2)",
    )
    parser.add_argument(
        "--to-next",
        "--to_next",
        action="store_true",
        help="affinities of a voxel are to the next voxels (default: to the previous ones)",
    )
    _add_label_arguments(parser, "segments", chunk_side=128)
    set_action(parser, SegmentOptions, segment, takes_beam_flags=True)


def _add_label_arguments(parser: argparse.ArgumentParser, plural: str, chunk_side: int) -> None:
    """Add the arguments of both commands; ``plural`` is what they make."""
    parser.add_argument(
        "--scale",
        type=natural,
        default=0,
        metavar="S",
        help="scale of IN, if it is precomputed (default: 0)",
    )
    parser.add_argument(
        "--min-size",
        "--min_size",
        type=positive,
        default=1,
        metavar="N",
        help=f"remove {plural} of fewer voxels (default: 1)",
    )
    parser.add_argument(
        "--format",
        choices=tuple(list_plugins("formats")),
        default="precomputed",
        help="format of OUT (default: precomputed, compressed as a segmentation)",
    )
    parser.add_argument(
        "--chunk_shape",
        "--chunk-shape",
        type=shape,
        metavar="ZxYxX",
        help=f"voxels of a unit of work (default: about {chunk_side} on a side)",
    )
    parser.add_argument(
        "--block_shape",
        "--block-shape",
        type=shape,
        metavar="ZxYxX",
        help="blocks of OUT (default: those of IN)",
    )
    parser.add_argument(
        "--shard_shape",
        "--shard-shape",
        type=shape,
        metavar="ZxYxX",
        help="shards of OUT: files of many blocks (default: none)",
    )
    parser.add_argument(
        "--pyramid", action="store_true", help="then make coarser scales of OUT, by mode"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the volume that is at OUT, and do everything again",
    )
    add_json(parser)
    add_logging(parser)


def components(options: ComponentsOptions) -> int:
    """Label the connected components of a volume."""
    return _make_labels(components_plan(options), options)


def components_plan(options: ComponentsOptions) -> LabelPlan:
    """Open the volume, and plan its components; nothing is written."""
    from beam_inference.segmentation.component_job import plan_components

    return plan_components(
        options.source,
        options.target,
        threshold=options.threshold,
        channel=options.channel,
        connectivity=options.connectivity,
        **_common_arguments(options),
    )


def segment(options: SegmentOptions) -> int:
    """Segment a volume of affinities, at one threshold or at several."""
    from beam_inference.segmentation.series import Series

    plan = segment_plan(options)
    return _make_series(plan, options) if isinstance(plan, Series) else _make_labels(plan, options)


def segment_plan(options: SegmentOptions) -> LabelPlan | Series:
    """Open the affinities, and plan their segmentation; nothing is written."""
    from beam_inference.segmentation.segment_job import plan_segmentation
    from beam_inference.segmentation.series import plan_series

    arguments = {
        "low": options.low,
        "high": options.high,
        "channels": options.channels,
        "to_next": options.to_next,
        **_common_arguments(options),
    }
    thresholds = options.threshold
    if len(set(thresholds)) == 1:
        return plan_segmentation(
            options.source, options.target, threshold=thresholds[0], **arguments
        )
    return plan_series(options.source, options.target, thresholds=thresholds, **arguments)


def _common_arguments(options: LabelOptions) -> Json:
    from beam_inference.segmentation.layout import Layout
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment

    layout = Layout(
        format=options.format,
        chunk_shape=options.chunk_shape,
        block_shape=options.block_shape,
        shard_shape=options.shard_shape,
    )
    return {
        "scale": options.scale,
        "min_size": options.min_size,
        "layout": layout,
        "storage": storage_of_environment(LOCAL),
        "flags": options.beam_flags,
        "overwrite": options.overwrite,
    }


def _make_labels(plan: LabelPlan, options: LabelOptions) -> int:
    """Run a plan, and print what it needs and its outcome."""
    from beam_inference.cli.status_text import as_json
    from beam_inference.segmentation.make_labels import check_holds_scales

    if options.pyramid:
        check_holds_scales(plan)
    # with --json, standard output is for the object alone
    with print_to_stderr() if options.json else nullcontext():
        result = _run_plan(plan, options)
    if options.json:
        print(as_json(_label_values(result)))
    return result.exit_code


def _run_plan(plan: LabelPlan, options: LabelOptions) -> LabelResult:
    """Make labels, then their coarser scales; print what each needs and how it went."""
    from beam_inference.segmentation.make_labels import make_labels

    _print_need(plan)
    result = make_labels(plan, options.beam_flags, overwrite=options.overwrite)
    product = f"{result.objects} {plan.table_folder} in {result.url}, listed in {result.table_url}"
    print(result.outcome.summary(product, options.command_to_continue))
    _print_warning(result)
    return _with_scales(plan, result, options)


def _print_need(plan: LabelPlan) -> None:
    print(
        f"{plan.grid.count} chunks, {format_bytes(plan.chunk_memory_bytes)} for each that is under "
        f"way{plan.more_memory}",
        flush=True,
    )


def _print_warning(result: LabelResult) -> None:
    if result.warning is not None:
        print(f"Warning: {result.warning}")


def _with_scales(plan: LabelPlan, result: LabelResult, options: LabelOptions) -> LabelResult:
    """Make the coarser scales of a complete volume, if they are wanted, and print how it went."""
    from beam_inference.segmentation.make_labels import make_coarser_scales

    if not (options.pyramid and result.outcome.is_complete):
        return result
    pyramid = make_coarser_scales(plan, options.beam_flags)
    if pyramid is not None:
        scales = f"{len(pyramid.scales)} coarser scales"
        print(pyramid.outcome.summary(scales, options.command_to_continue))
    return replace(result, pyramid=pyramid)


def _make_series(series: Series, options: LabelOptions) -> int:
    """Make volumes at several thresholds, and print what they need and their outcome."""
    from beam_inference.cli.status_text import as_json
    from beam_inference.segmentation.make_labels import check_holds_scales

    if options.pyramid:
        check_holds_scales(series.plans[0])
    with print_to_stderr() if options.json else nullcontext():
        results = _run_series(series, options)
    if options.json:
        print(as_json(_series_values(series, results)))
    return max(result.exit_code for result in results)


def _run_series(series: Series, options: LabelOptions) -> list[LabelResult]:
    from beam_inference.segmentation.make_labels import make_series

    _print_need(series.plans[0])
    results = make_series(series, options.beam_flags, overwrite=options.overwrite)
    product = f"{len(results)} volumes in {series.url}"
    print(results[0].outcome.summary(product, options.command_to_continue))
    finished: list[LabelResult] = []
    for plan, result in zip(series.plans, results, strict=True):
        if result.objects is not None:
            print(f"threshold {plan.threshold:.10g}: {result.objects} segments in {result.url}")
        _print_warning(result)
        is_usual = all(each.exit_code == COMPLETE for each in finished)
        finished.append(_with_scales(plan, result, options) if is_usual else result)
    return finished


def _series_values(series: Series, results: Sequence[LabelResult]) -> Json:
    """The outcome of several thresholds, as JSON values."""
    from beam_inference.cli.status_text import stage_values

    return {
        **stage_values(results[0].outcome),
        "complete": all(result.exit_code == COMPLETE for result in results),
        "output": series.url,
        "volumes": [
            {"threshold": plan.threshold, **_volume_values(result)}
            for plan, result in zip(series.plans, results, strict=True)
        ],
    }


def _label_values(result: LabelResult) -> Json:
    """The outcome of a command that makes labels, as JSON values."""
    from beam_inference.cli.status_text import stage_values

    return {
        **stage_values(result.outcome),
        "complete": result.exit_code == COMPLETE,
        **_volume_values(result),
    }


def _volume_values(result: LabelResult) -> Json:
    """A volume of labels, as JSON values."""
    from beam_inference.cli.status_text import stage_values

    pyramid = result.pyramid
    scales = None
    if pyramid is not None:
        scales = {**stage_values(pyramid.outcome), "scales": len(pyramid.scales)}
    return {
        "output": result.url,
        "table": result.table_url,
        "objects": result.objects,
        "warning": result.warning,
        "pyramid": scales,
    }
