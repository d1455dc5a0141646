"""Results of label jobs that are most likely not what was wanted: nothing, or one object of all."""

from __future__ import annotations

from beam_inference.segmentation.plans import LabelPlan
from beam_inference.segmentation.table import first_rows

_NEARLY_ALL = 0.99
"""Share of the volume from which on one object counts as all of it."""


def degenerate_warning(plan: LabelPlan, objects: int) -> str | None:
    """Words on a result that separates nothing; None for any other.

    Args:
        plan: a plan that was carried out.
        objects: number of objects in its output.
    """
    if objects > 1:
        return None
    if objects == 0:
        return f"{plan.output.url} is empty: {_causes_of_nothing(plan)}. {_ADVICE}"
    share = sum(row.voxels for row in first_rows(plan, 1)) / plan.grid.roi.size
    if share < _NEARLY_ALL:
        return None
    return (
        f"one object has {100 * share:.4g} % of the voxels of {plan.output.url}: "
        f"{plan.cause_of_all}. {_ADVICE}"
    )


def _causes_of_nothing(plan: LabelPlan) -> str:
    if plan.min_size == 1:
        return plan.cause_of_nothing
    return f"{plan.cause_of_nothing}, or every object has fewer than {plan.min_size} voxels"


_ADVICE = "Compare what you asked for with the values that the input holds."
