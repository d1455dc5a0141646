"""Views of stored arrays: what TensorStore makes of an array by casts, downsampling and transforms.

A spec of a view has the array's spec inside, several levels deep perhaps. An index transform leads
from each level to the next; downsampling also changes what an index counts::

    cast        transform: indices of the view     -> indices of its base
      base: downsample    transform, factors: …    -> indices of its base
        base: zarr        transform: …             -> indices of the stored array
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorstore as ts

from beam_inference.config.fields import Json


@dataclass(frozen=True)
class View:
    """What an open array is made of.

    Attributes:
        stored: TensorStore's spec of the stored array, with the dtype that it has.
        levels: specs of what is made of it, from the outermost on, each without its base; none
            where the stored array itself is read.
        transforms: index transforms from each level to the next one, the last to the stored array.
    """

    stored: Json
    levels: tuple[Json, ...]
    transforms: tuple[ts.IndexTransform, ...]

    def stored_spans(self, window: ts.TensorStore) -> list[tuple[int, int]]:
        """First and last position of a window of the view on each axis of the stored array."""
        transform = transform_of(window)
        spans = _spans(
            transform, [(each.inclusive_min, each.inclusive_max) for each in window.domain]
        )
        for level, inner in zip(self.levels, self.transforms[1:], strict=True):
            factors = level.get("downsample_factors", [1] * len(spans))
            spans = [(a * n, b * n + n - 1) for (a, b), n in zip(spans, factors, strict=True)]
            bounds = [(each.inclusive_min, each.inclusive_max) for each in inner.domain]
            spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(spans, bounds, strict=True)]
            spans = _spans(inner, spans)
        return spans

    def axes(
        self, labels: Sequence[str], sizes: Sequence[float | None]
    ) -> tuple[list[str], list[float | None]]:
        """Names of the view's axes, and sizes of a step along them, by those of the stored array.

        Args:
            labels: names of the stored array's axes, in its own order.
            sizes: size of a step along each; None where it is not known.
        """
        named = _axes(self.transforms[-1], labels, sizes)
        for level, outer in zip(reversed(self.levels), reversed(self.transforms[:-1]), strict=True):
            factors = level.get("downsample_factors", [1] * len(named[0]))
            steps = [
                None if size is None else size * factor
                for size, factor in zip(named[1], factors, strict=True)
            ]
            named = _axes(outer, named[0], steps)
        return named

    def of_array(self, array: ts.TensorStore) -> ts.TensorStore:
        """The same view of another array, with the indices of the stored one."""
        view = array[self.transforms[-1]]
        for level, outer in zip(reversed(self.levels), reversed(self.transforms[:-1]), strict=True):
            if level["driver"] == "downsample":
                view = ts.downsample(view, level["downsample_factors"], level["downsample_method"])
            else:
                view = ts.cast(view, ts.dtype(level["dtype"]))
            view = view[outer]
        return view


def view_of(store: ts.TensorStore) -> View:
    """What an open array is made of."""
    spec: Json = store.spec().to_json()
    transforms = [transform_of(store)]
    levels = []
    dtype = store.dtype.name
    while isinstance(spec.get("base"), dict):
        dtype = spec.get("dtype", dtype)  # not repeated where it is that of the level outside
        level = {key: value for key, value in spec.items() if key != "base"}
        levels.append(level | {"dtype": dtype})
        spec = spec["base"]
        transform = spec.get("transform")
        rank = transforms[-1].output_rank
        transforms.append(
            ts.IndexTransform(rank) if transform is None else ts.IndexTransform(json=transform)
        )
    return View({"dtype": dtype, **spec}, tuple(levels), tuple(transforms))


def transform_of(store: ts.TensorStore) -> ts.IndexTransform:
    """The index transform of an open array."""
    transform = store.spec().transform
    assert transform is not None, "an open array has one"
    return transform


def _spans(transform: ts.IndexTransform, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """First and last position on each axis that a transform leads to, of ranges of its own."""
    found = []
    for output in transform.output:
        if output.index_array is not None:
            ends = [int(output.index_array.min()), int(output.index_array.max())]
        elif output.input_dimension is not None:
            ends = list(spans[output.input_dimension])
        else:
            ends = [0]
        places = [output.offset + (output.stride or 0) * end for end in ends]
        found.append((min(places), max(places)))
    return found


def _axes(
    transform: ts.IndexTransform, labels: Sequence[str], sizes: Sequence[float | None]
) -> tuple[list[str], list[float | None]]:
    """Names and steps of the axes that a transform leads from, by those that it leads to."""
    named = list(transform.input_labels)
    steps: list[float | None] = [None] * len(named)
    for output, label, size in zip(transform.output, labels, sizes, strict=True):
        axis = output.input_dimension
        if axis is not None:
            named[axis] = named[axis] or label
            steps[axis] = None if size is None else size * abs(output.stride or 0)
    return named, steps
