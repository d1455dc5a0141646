"""The command that judges a volume by labels: ``evaluate``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from beam_inference.cli.argument_types import natural, positive, shape
from beam_inference.cli.command import (
    PipelineOptions,
    Subparsers,
    add_command,
    add_json,
    add_logging,
    set_action,
)
from beam_inference.cli.written_files import check_page, check_result, refuse_inside, replace_file
from beam_inference.geometry.zyx import Zyx

if TYPE_CHECKING:
    from beam_inference.evaluation.evaluate import Evaluation
    from beam_inference.evaluation.plans import Kind
    from beam_inference.evaluation.series import SeriesEvaluation


@dataclass(frozen=True)
class EvaluateOptions(PipelineOptions):
    """Options of ``evaluate``."""

    output: str
    labels: str
    kind: Kind | None
    scale: int
    labels_scale: int
    channel: int | None
    ignore: Sequence[int]
    positive: Sequence[int]
    threshold: Sequence[float]
    range: tuple[float, float]
    cell_shape: Zyx
    chunk_shape: Zyx | None
    worst: int
    state: str | None
    page: str | None
    to: str | None
    json: bool


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "evaluate",
        "judge a volume by labels, exact across chunks",
        "objects labels --ignore 0 --page evaluation.html",
        "gs://bucket/map gs://bucket/labels --as map --threshold 128 --json "
        "--runner=DataflowRunner",
        description=(
            "Judge a volume by labels, as if both were in memory: objects by variation of "
            "information and adapted Rand error, classes by Dice coefficients, a map by average "
            "precision, ROC and Dice; and list the worst objects and places. Any flag of Apache "
            "Beam may follow."
        ),
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        help="the volume to judge, or the folder of several thresholds of segment; a path or URL",
    )
    parser.add_argument("labels", metavar="LABELS", help="the labels, a path or URL")
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("objects", "classes", "map"),
        help="what OUT holds (default: objects if its dtype is of ids, map if of floats)",
    )
    _add_places_in_volumes(parser)
    _add_judgement(parser)
    parser.add_argument(
        "--state",
        metavar="URL",
        help="folder for records while it is under way (default: OUT)",
    )
    parser.add_argument("--page", metavar="FILE", help="also write a page, with places to look at")
    parser.add_argument("--to", metavar="FILE", help="also write what --json prints, for boxes")
    add_json(parser)
    add_logging(parser)
    set_action(parser, EvaluateOptions, evaluate, takes_beam_flags=True)


def _add_places_in_volumes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale", type=natural, default=0, metavar="S", help="scale of OUT (default: 0)"
    )
    parser.add_argument(
        "--labels-scale",
        "--labels_scale",
        type=natural,
        default=0,
        metavar="S",
        help="scale of LABELS (default: 0)",
    )
    parser.add_argument(
        "--channel", type=natural, metavar="C", help="channel of OUT; required if it has several"
    )
    parser.add_argument(
        "--cell_shape",
        "--cell-shape",
        type=shape,
        default=(64, 64, 64),
        metavar="ZxYxX",
        help="voxels of a place to look at (default: 64x64x64)",
    )
    parser.add_argument(
        "--chunk_shape",
        "--chunk-shape",
        type=shape,
        metavar="ZxYxX",
        help="voxels of a unit of work, whole places (default: about 192 on a side)",
    )


def _add_judgement(parser: argparse.ArgumentParser) -> None:
    for name, help in (
        ("ignore", "a label whose voxels are not judged, such as 0; may be given again"),
        ("positive", "a label that a map should find; may be given again (default: all but 0)"),
    ):
        parser.add_argument(
            f"--{name}", type=natural, action="append", default=[], metavar="LABEL", help=help
        )
    parser.add_argument(
        "--threshold",
        type=float,
        action="append",
        default=[],
        metavar="T",
        help=(
            "score a map cut at T, in stored units; may be given again, and the first one ranks "
            "places (default: the middle of the range)"
        ),
    )
    parser.add_argument(
        "--range",
        type=_range,
        default=(0.0, 1.0),
        metavar="LOW,HIGH",
        help="range of a map of floats (default: 0,1)",
    )
    parser.add_argument(
        "--worst",
        type=positive,
        default=20,
        metavar="N",
        help="how many objects and places to list (default: 20)",
    )


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not two numbers, such as 0,1") from None
    return low, high


def evaluate(options: EvaluateOptions) -> int:
    """Judge a volume by labels, or the volumes of several thresholds."""
    from beam_inference.evaluation.evaluate import evaluate as judge
    from beam_inference.evaluation.page import render_evaluation
    from beam_inference.evaluation.series import evaluate_series
    from beam_inference.segmentation.series import read_thresholds
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of

    if options.page is not None:
        check_page("--page", options.page)
        refuse_inside("--page", options.page, [options.output, options.labels])
    if options.to is not None:
        check_result("--to", options.to, "output")
        refuse_inside("--to", options.to, [options.output, options.labels])
    storage = storage_of_environment(LOCAL)
    arguments: dict[str, Any] = {
        "kind": options.kind,
        "scale": options.scale,
        "labels_scale": options.labels_scale,
        "channel": options.channel,
        "ignore": options.ignore,
        "positive": options.positive,
        "thresholds": options.threshold,
        "value_range": options.range,
        "cell_shape": options.cell_shape,
        "chunk_shape": options.chunk_shape,
        "worst": options.worst,
        "state": options.state,
        "storage": storage,
        "flags": options.beam_flags,
    }
    of_series = read_thresholds(url_of(options.output), storage)
    series = None
    if of_series is None:
        single = judge(options.output, options.labels, **arguments)
        evaluation = single.evaluation
        outcome = single.outcome
    else:
        several = evaluate_series(options.output, options.labels, at=of_series, **arguments)
        series = several.evaluation
        evaluation = None if series is None else series.best.evaluation
        outcome = several.outcome
    if evaluation is None:
        print(outcome.summary("the scores", options.command_to_continue))
        return outcome.exit_code
    if options.page is not None:
        with replace_file(options.page) as page:
            page.write_text(render_evaluation(evaluation, series), encoding="utf-8")
    text = json.dumps((series or evaluation).as_json(), indent=1)
    if options.to is not None:
        with replace_file(options.to) as result:
            result.write_text(text, encoding="utf-8")
    print(text if options.json else _describe(evaluation, series))
    return outcome.exit_code


def _describe(evaluation: Evaluation, series: SeriesEvaluation | None) -> str:
    from beam_inference.evaluation.page import (
        describe_evaluation,
        describe_places,
        describe_series,
    )

    lines = [describe_evaluation(evaluation), describe_places(evaluation)]
    if series is not None:
        lines = [describe_series(series), f"\nthreshold {series.best.threshold:.10g}:", *lines]
    return "\n".join(lines)
