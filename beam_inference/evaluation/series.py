"""Judge segmentations of one volume at several thresholds by labels, so that one can be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from beam_inference.beam.stage_runner import StageOutcome
from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.evaluation.evaluate import Evaluation, plan_evaluation, run_evaluations
from beam_inference.evaluation.object_scores import ObjectScores
from beam_inference.evaluation.plans import Kind
from beam_inference.segmentation.series import volume_name
from beam_inference.volumes.kvstores import LOCAL, url_of


@dataclass(frozen=True, slots=True)
class ThresholdEvaluation:
    """How well the segmentation at a threshold agrees with labels."""

    threshold: float
    evaluation: Evaluation

    @property
    def objects(self) -> ObjectScores:
        """The scores of its objects."""
        assert self.evaluation.objects is not None, "a series holds objects"
        return self.evaluation.objects


@dataclass(frozen=True, slots=True)
class SeriesEvaluation:
    """How well segmentations at several thresholds agree with labels.

    Attributes:
        output: URL of the folder of the segmentations.
        volumes: in the order of thresholds.
    """

    output: str
    volumes: Sequence[ThresholdEvaluation]

    @property
    def best(self) -> ThresholdEvaluation:
        """The volume of the least variation of information; of equal ones, the lowest threshold."""
        return self._least(lambda scores: scores.variation_of_information)

    @property
    def best_by_rand(self) -> ThresholdEvaluation:
        """The volume of the least adapted Rand error; of equal ones, the lowest threshold."""
        return self._least(lambda scores: scores.adapted_rand_error)

    def _least(self, score: Callable[[ObjectScores], float]) -> ThresholdEvaluation:
        return min(self.volumes, key=lambda each: score(each.objects))

    def as_json(self) -> Json:
        """All of it as JSON values."""
        return {
            "output": self.output,
            "best": {
                "variation_of_information": self.best.threshold,
                "adapted_rand_error": self.best_by_rand.threshold,
            },
            "thresholds": [
                {"threshold": each.threshold, **each.evaluation.as_json()} for each in self.volumes
            ],
        }


@dataclass(frozen=True, slots=True)
class SeriesResult:
    """The evaluation of a series, and how far it is.

    Attributes:
        evaluation: None unless all chunks are done.
        outcome: how the stages ended.
    """

    evaluation: SeriesEvaluation | None
    outcome: StageOutcome


def evaluate_series(
    output: str,
    labels: str,
    *,
    at: Sequence[float],
    kind: Kind | None = None,
    state: str | None = None,
    storage: Storage = LOCAL,
    flags: Sequence[str] = (),
    **options: Any,
) -> SeriesResult:
    """Judge the segmentations of a folder by labels, all in one go.

    Args:
        output: path or URL of the folder that ``segment`` made of several thresholds.
        labels: path or URL of the labels.
        at: thresholds of the folder, see
            :func:`~beam_inference.segmentation.series.read_thresholds`.
        kind: "objects" or None.
        state: path or URL of a folder for records while it is under way; by default the output's.
        storage: how object stores are reached.
        flags: Beam's flags.
        options: all others of :func:`~beam_inference.evaluation.evaluate.plan_evaluation`.

    Raises:
        UserError: the volumes cannot be judged so.
    """
    if kind not in (None, "objects"):
        raise ConfigError(
            f"--as {kind}: {output} holds segmentations at several thresholds, which are objects"
        )
    url = url_of(output)
    plans = [
        plan_evaluation(
            f"{url}/{volume_name(threshold)}", labels, kind="objects", storage=storage, **options
        )
        for threshold in at
    ]
    boxes = {plan.grid.roi for plan in plans}
    if len(boxes) > 1:
        raise VolumeError(
            f"the segmentations in {url} cover unlike boxes, {', '.join(map(str, boxes))}: scores "
            "of these cannot be compared. Make them anew by one command"
        )
    description = {"volumes": [plan.description for plan in plans]}
    state_url = url if state is None else url_of(state)
    evaluations, outcome = run_evaluations(plans, description, state_url, flags)
    if not evaluations:
        return SeriesResult(None, outcome)
    volumes = [ThresholdEvaluation(*each) for each in zip(at, evaluations, strict=True)]
    return SeriesResult(SeriesEvaluation(url, volumes), outcome)
