"""An evaluation as text, and as a page with ranked places to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from beam_inference.config.fields import Json
from beam_inference.errors import BeamInferenceError, ConfigError
from beam_inference.evaluation.evaluate import Evaluation
from beam_inference.evaluation.map_scores import Bounded, MapScores
from beam_inference.evaluation.object_scores import ClassDice, ObjectScores, WorstObject
from beam_inference.evaluation.series import SeriesEvaluation
from beam_inference.view.layers import View, view_of
from beam_inference.view.viewer_state import Boxes, hosted_link

_MOST_CLASSES = 64
"""Classes that are listed as text; JSON has all."""


def describe_evaluation(evaluation: Evaluation) -> str:
    """The scores as lines of text, without objects and places."""
    lines = [f"{evaluation.judged:,} of {evaluation.box.size:,} voxels judged, in {evaluation.box}"]
    if evaluation.objects is not None:
        lines += _object_lines(evaluation.objects)
    if evaluation.map is not None:
        lines += _map_lines(evaluation.map)
    if evaluation.kind == "classes":
        lines += _class_lines(evaluation.classes, evaluation.dice)
    return "\n".join(lines)


def describe_series(series: SeriesEvaluation) -> str:
    """The scores of several thresholds as a table, and the best of them."""
    lines = [_SERIES_HEADER]
    for each in series.volumes:
        scores = each.objects
        lines.append(
            f"{each.threshold:>10.10g} {scores.segments:>12,} "
            f"{scores.variation_of_information:>12.6f} {scores.information_split:>10.6f} "
            f"{scores.information_merge:>10.6f} {scores.adapted_rand_error:>14.6f}"
        )
    for name, best in (
        ("variation of information", series.best),
        ("adapted Rand error", series.best_by_rand),
    ):
        lines.append(f"least {name}: threshold {best.threshold:.10g}, {best.evaluation.output}")
    return "\n".join(lines)


_SERIES_HEADER = (
    f"{'threshold':>10} {'segments':>12} {'information':>12} {'split':>10} {'merge':>10} "
    f"{'adapted Rand':>14}"
)


def describe_places(evaluation: Evaluation) -> str:
    """The worst objects and places as lines of text."""
    lines = []
    for title, objects in _objects(evaluation):
        lines += [
            f"{title}: {each.id}, {each.bits:.3g} bits, {each.parts} parts, {each.largest:,} of "
            f"{each.voxels:,} voxels in the largest, {each.box}"
            for each in objects
        ]
    lines += [
        f"look at {place.box}: {place.wrong:,} of {place.judged:,} voxels are wrong"
        for place in evaluation.places
    ]
    return "\n".join(lines)


def render_evaluation(evaluation: Evaluation, series: SeriesEvaluation | None = None) -> str:
    """Render the page as HTML; what comes from outside is escaped.

    Args:
        evaluation: the evaluation.
        series: the thresholds that it is the best of; None where there is one volume.

    Raises:
        ConfigError: Jinja is not installed.
    """
    jinja2 = _jinja()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("beam_inference.evaluation", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page: str = environment.get_template("page.html").render(_values(evaluation, series))
    return page


def _jinja() -> ModuleType:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError(
            f"--page needs Jinja ({error}): pip install 'beam-inference[report]'"
        ) from None
    return jinja2


def _values(evaluation: Evaluation, series: SeriesEvaluation | None) -> Json:
    links, how_to_look = _links(evaluation)
    table = "" if series is None else f"{describe_series(series)}\n\n"
    roc = () if evaluation.map is None else evaluation.map.roc
    return {
        "evaluation": evaluation,
        "text": table + describe_evaluation(evaluation),
        "curve": _path(roc),
        "how_to_look": how_to_look,
        "places": [
            {"box": place.box, "wrong": place.wrong, "judged": place.judged, "link": link}
            for place, link in zip(evaluation.places, links, strict=True)
        ],
        "objects": _objects(evaluation),
    }


def _path(points: Sequence[tuple[float, float]]) -> str:
    """An SVG path from (0, 0) at the lower left to (1, 1); empty if there are no points."""
    return ("M " if points else "") + " L ".join(f"{x:.4f} {1 - y:.4f}" for x, y in points)


def _objects(evaluation: Evaluation) -> list[tuple[str, Sequence[WorstObject]]]:
    both = (("split label", evaluation.split), ("merging segment", evaluation.merged))
    return [(title, objects) for title, objects in both if objects]


def _links(evaluation: Evaluation) -> tuple[list[str | None], str]:
    """A link to each place, where a viewer on the web reaches the volumes; and what to do."""
    nothing: list[str | None] = [None] * len(evaluation.places)
    try:
        view = view_of(None, [evaluation.output, evaluation.labels], patches=False)
    except BeamInferenceError as error:
        return nothing, f"There are no links: {error}"
    if view.folders:
        return nothing, (
            "The volumes are on a machine of yours: open them there with beam-inference view "
            f"{evaluation.output} {evaluation.labels}"
        )
    return [hosted_link(state) for state in place_states(view, evaluation)], "Boxes are links."


def place_states(view: View, evaluation: Evaluation) -> list[Json]:
    """States of Neuroglancer, one for each place, with that place in the middle.

    Args:
        view: the volumes.
        evaluation: whose places are marked.
    """
    marked = Boxes(
        "places",
        "#ff0000",
        [
            (f"{place.wrong} of {place.judged} voxels are wrong", place.box)
            for place in evaluation.places
        ],
    )
    return [
        replace(view, roi=place.box, marked=[marked]).state(None, 0) for place in evaluation.places
    ]


def _object_lines(scores: ObjectScores) -> list[str]:
    return [
        f"{scores.labels:,} labels, {scores.segments:,} segments",
        f"variation of information: {scores.variation_of_information:.6g} bits "
        f"(split {scores.information_split:.6g}, merge {scores.information_merge:.6g})",
        f"adapted Rand error: {scores.adapted_rand_error:.6g} (split {scores.rand_split:.6g}, "
        f"merge {scores.rand_merge:.6g}; 1 is best)",
    ]


def _class_lines(classes: Sequence[ClassDice], dice: float | None) -> list[str]:
    lines = [f"Dice of all classes but 0: {_number(dice)}"]
    lines += [
        f"Dice of class {each.id}: {_number(each.dice)} ({each.label_voxels:,} voxels in the "
        f"labels, {each.output_voxels:,} in the output)"
        for each in classes[:_MOST_CLASSES]
    ]
    left = len(classes) - _MOST_CLASSES
    return lines + ([f"{left} more classes: see --json"] if left > 0 else [])


def _map_lines(scores: MapScores) -> list[str]:
    lines = [
        f"{scores.positives:,} positive and {scores.negatives:,} negative voxels",
        f"average precision: {_bounded(scores.average_precision)}",
        f"area under the ROC: {_bounded(scores.roc_auc)}",
    ]
    for name, each in [("at", each) for each in scores.thresholds] + [("best at", scores.best)]:
        lines.append(
            f"{name} {each.threshold:.6g}: Dice {_number(each.dice)}, precision "
            f"{_number(each.precision)}, recall {_number(each.recall)}"
        )
    return lines


def _bounded(score: Bounded) -> str:
    if score.value is None or score.low == score.high:
        return _number(score.value)
    return f"{score.value:.6g} (without bins from {score.low:.6g} to {score.high:.6g})"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
