"""The command of the labelling loop: ``boxes``."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from beam_inference.cli.argument_types import number_type, positive, triple_type
from beam_inference.cli.command import (
    Options,
    Subparsers,
    add_command,
    add_debug,
    add_json,
    set_action,
)
from beam_inference.cli.terminal import print_to_stderr
from beam_inference.config.plugins import list_plugins
from beam_inference.errors import COMPLETE
from beam_inference.geometry.zyx import Zyx

if TYPE_CHECKING:
    from beam_inference.evaluation.boxes import Export
    from beam_inference.evaluation.corrections import Corrections

_context = triple_type(number_type(int, lambda value: value >= 0, "a whole number from 0 on"))
_weight = number_type(float, lambda value: 0 < value < float("inf"), "a number above 0")


@dataclass(frozen=True)
class BoxesOptions(Options):
    """Options of ``boxes``."""

    folder: str
    evaluation: str | None
    training: str
    context: Zyx
    most: int
    format: str
    image: str | None
    take: str | None
    weight: float
    json: bool


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "boxes",
        "export the worst boxes for annotators, and take corrected labels back",
        "worst --from evaluation.json --training training.yaml --context 8,16,16",
        "worst --training training.yaml --take second.yaml",
        description=(
            "Export the worst places of an evaluation as small volumes for annotators: image, "
            "labels and prediction of each. Once labels are corrected there, --take writes a "
            "training file that trains with them, too, in the same split."
        ),
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of the small volumes")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from",
        dest="evaluation",
        metavar="FILE",
        help="export the worst places of an evaluation, a file that evaluate --json has printed",
    )
    direction.add_argument(
        "--take",
        metavar="FILE",
        help="take corrected labels back, and write a training file with them",
    )
    parser.add_argument(
        "--training", required=True, metavar="FILE", help="the training file that boxes are for"
    )
    parser.add_argument(
        "--image",
        metavar="URL",
        help="which image of the training was judged (default: that of the labels that were)",
    )
    parser.add_argument(
        "--context",
        type=_context,
        default=(0, 0, 0),
        metavar="Z,Y,X",
        help="voxels around a place that are exported, too (default: 0,0,0)",
    )
    parser.add_argument(
        "--most", type=positive, default=10, metavar="N", help="export at most N (default: 10)"
    )
    parser.add_argument(
        "--format",
        default="precomputed",
        metavar="FORMAT",
        help=(
            f"of the small volumes: {', '.join(list_plugins('formats'))}, or a format of files of "
            "convert, such as tiff, nrrd or hdf5 (default: precomputed)"
        ),
    )
    parser.add_argument(
        "--weight",
        type=_weight,
        default=1.0,
        metavar="W",
        help=(
            "with --take: how often samples come from corrected boxes, per place, compared with "
            "others (default: 1)"
        ),
    )
    add_json(parser)
    add_debug(parser)
    set_action(parser, BoxesOptions, boxes)


def boxes(options: BoxesOptions) -> int:
    """Export boxes, or take them back."""
    if options.evaluation is not None:
        return _export(options, Path(options.evaluation))
    assert options.take is not None, "argparse requires one of the two"
    return _take(options, Path(options.take))


def _export(options: BoxesOptions, evaluation: Path) -> int:
    from beam_inference.evaluation.boxes import export_boxes, load_evaluation
    from beam_inference.volumes.kvstores import url_of

    with print_to_stderr() if options.json else nullcontext():
        export = export_boxes(
            Path(options.folder),
            load_evaluation(evaluation),
            Path(options.training),
            context=options.context,
            most=options.most,
            format=options.format,
            image=None if options.image is None else url_of(options.image),
        )
    if options.json:
        values = export.record.model_dump(mode="json")
        print(json.dumps({**values, "left_out": export.left_out}, indent=1))
    else:
        print(_describe_export(export, options))
    return COMPLETE


def _describe_export(export: Export, options: BoxesOptions) -> str:
    lines = [
        f"{box.name}: {box.core.box}, {box.wrong:,} of {box.judged:,} voxels are wrong"
        for box in export.record.boxes
    ]
    if export.left_out:
        lines.append(
            f"{export.left_out} places are left out: they are not of the training set alone"
        )
    lines.append(
        f"complete: {options.folder}; correct the labels there, then: beam-inference boxes "
        f"{options.folder} --training {options.training} --take second.yaml"
    )
    return "\n".join(lines)


def _take(options: BoxesOptions, to: Path) -> int:
    from beam_inference.evaluation.corrections import take_corrections

    corrections = take_corrections(
        Path(options.folder), Path(options.training), to, weight=options.weight
    )
    if options.json:
        print(json.dumps({**asdict(corrections), "training": str(to)}, indent=1))
    else:
        print(_describe_corrections(corrections))
    return COMPLETE


def _describe_corrections(corrections: Corrections) -> str:
    lines = [f"corrected: {', '.join(corrections.taken)}"]
    if corrections.unchanged:
        lines.append(f"as exported, and left out: {', '.join(corrections.unchanged)}")
    if corrections.weights is not None:
        lines.append(f"the training begins with {corrections.weights}")
    lines.append(
        f"complete: {corrections.training}; next: beam-inference train {corrections.training}"
    )
    return "\n".join(lines)
