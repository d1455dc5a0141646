"""Loops over regions, edges and voxels, compiled by Numba; imported through :mod:`.compiled` alone.

They hold no lock of Python's, so the threads of a worker compute at the same time. What was
compiled is kept in a folder of the user's, for the same processor, versions and source.

Some of them are long: a loop is compiled as it stands, and parts that share a dozen arrays are no
easier to read as functions of a dozen arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.segmentation.compiled_folder import compiled_folder

Function = TypeVar("Function", bound=Callable[..., Any])
Ints = NDArray[np.int64]
Places = NDArray[np.int32]
Whole: TypeAlias = Any
"""A whole number, of Python or of an array: for Numba they are the same."""

Number: TypeAlias = Any
"""A floating-point number or a truth value, of either."""

_FOLDER = compiled_folder()


def _compile(function: Function) -> Function:
    # NumPy's rules for errors: no check of each quotient for a divisor of zero.
    before = numba.config.CACHE_DIR
    if not before and _FOLDER is not None:
        numba.config.CACHE_DIR = str(_FOLDER)
    keep = bool(before) or _FOLDER is not None
    try:
        compiled: Function = numba.njit(nogil=True, cache=keep, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
    return compiled


_EXACT = 2**53
"""Whole numbers up to this are float64 without rounding."""


@_compile
def mean_of(total: Whole, count: Whole) -> Number:
    """The quotient of two integers, correctly rounded, whatever their size; ``count`` positive."""
    if -_EXACT <= total <= _EXACT and count <= _EXACT:
        return total / count
    rest = abs(total)
    whole = rest // count
    rest -= whole * count
    shift = 0
    # Two bits more than a float64 holds; the last one says whether anything is left below it. Then
    # the conversion to float64 rounds as that of the exact quotient would.
    while whole < 4 * _EXACT and shift < 128:
        twice = rest >= count - rest
        rest = rest - (count - rest) if twice else rest + rest
        whole = 2 * whole + twice
        shift += 1
    quotient = float(whole | (rest > 0)) * 0.5**shift
    return -quotient if total < 0 else quotient


@_compile
def _slot(parent: Places, region: Whole) -> Whole:
    while parent[region] != region:
        parent[region] = parent[parent[region]]
        region = parent[region]
    return region


@_compile
def _hash(key: Whole, mask: Whole) -> Whole:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(20)) & np.uint64(mask))


@_compile
def _find(keys: Ints, key: Whole) -> Whole:
    """The place of a key in a table, or of the free place (-1) where it would be."""
    mask = len(keys) - 1
    place = _hash(key, mask)
    while keys[place] != key and keys[place] != -1:
        place = (place + 1) & mask
    return place


@_compile
def _remove(keys: Ints, values: Places, place: Whole) -> None:
    """Free a place of a table, and close the gap: no place is lost, however often this is done."""
    mask = len(keys) - 1
    gap = place
    while True:
        place = (place + 1) & mask
        if keys[place] == -1:
            break
        # A key may lie before its own hash's place by no step.
        if ((place - _hash(keys[place], mask)) & mask) >= ((place - gap) & mask):
            keys[gap] = keys[place]
            values[gap] = values[place]
            gap = place
    keys[gap] = -1


@_compile
def _is_better(mean: Number, code: Whole, than_mean: Number, than_code: Whole) -> Number:
    return mean > than_mean or (mean == than_mean and code > than_code)


@_compile
def _sink(
    means: NDArray[np.float64], codes: Ints, edges: Places, size: Whole, place: Whole
) -> None:
    """Restore a heap, the best at its top, whose entry at a place may be too good or too bad."""
    mean = means[place]
    code = codes[place]
    edge = edges[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _is_better(
            means[child + 1], codes[child + 1], means[child], codes[child]
        ):
            child += 1
        if not _is_better(means[child], codes[child], mean, code):
            break
        means[place] = means[child]
        codes[place] = codes[child]
        edges[place] = edges[child]
        place = child
    means[place] = mean
    codes[place] = code
    edges[place] = edge


@_compile
def join_regions(  # noqa: C901, PLR0912, PLR0915 - see above
    ones: Places,
    others: Places,
    sums: Ints,
    counts: Ints,
    waiting: NDArray[np.bool_],
    threshold: float,
) -> Places:
    """Join regions while the best pair of all reaches the threshold, or let the pair wait.

    Pairs are ranked by mean, then by the greater lesser name, then by the greater greater name: see
    :mod:`~beam_inference.segmentation.agglomeration`. A region has a slot, which is that of its
    part with the longer list of edges: only the shorter list is gone through, so that a body which
    takes in thousands of fragments does not go through its own neighbours each time.

    Args:
        ones: the one region of each edge.
        others: the other one; no two edges are between the same regions.
        sums: sum of each edge; changed.
        counts: count of each edge, positive; changed: 0 means that the edge is no more.
        waiting: whether each region waits; changed: then it is whether the whole waits, at its
            name, and False elsewhere.
        threshold: the least mean of a pair that is joined.

    Returns:
        The name of the region that each is now part of, which is the least of its parts.
    """
    regions = len(waiting)
    edges = len(ones)
    parent = np.arange(regions).astype(np.int32)
    name = parent.copy()
    # The edges of a slot are a chain of ends: end 2e is that of edge e at its one region, end
    # 2e + 1 at its other one.
    first = np.full(regions, -1, np.int32)
    last = np.full(regions, -1, np.int32)
    length = np.zeros(regions, np.int32)
    following = np.full(2 * edges, -1, np.int32)
    places = 16
    while places < 2 * edges:
        places *= 2
    # The edge between two slots.
    keys = np.full(places, -1, np.int64)
    found = np.empty(places, np.int32)
    means = np.empty(edges, np.float64)
    codes = np.empty(edges, np.int64)
    queue = np.empty(edges, np.int32)
    size = 0
    for edge in range(edges):
        one = ones[edge]
        other = others[edge]
        for side in range(2):
            region = other if side else one
            end = 2 * edge + side
            following[end] = first[region]
            first[region] = end
            if last[region] < 0:
                last[region] = end
            length[region] += 1
        code = np.int64(min(one, other)) * regions + max(one, other)
        place = _find(keys, code)
        keys[place] = code
        found[place] = edge
        mean = mean_of(sums[edge], counts[edge])
        if mean >= threshold:
            means[size] = mean
            codes[size] = code
            queue[size] = edge
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sink(means, codes, queue, size, place)

    while size:
        edge = queue[0]
        drop = counts[edge] == 0
        one = _slot(parent, ones[edge])
        other = _slot(parent, others[edge])
        if not drop:
            mean = mean_of(sums[edge], counts[edge])
            code = np.int64(min(name[one], name[other])) * regions + max(name[one], name[other])
            drop = mean < threshold
            if not drop and (mean != means[0] or code != codes[0]):
                means[0] = mean  # it has sunk since it was queued: joins change means
                codes[0] = code
                _sink(means, codes, queue, size, 0)
                continue
        size -= 1
        means[0] = means[size]
        codes[0] = codes[size]
        queue[0] = queue[size]
        _sink(means, codes, queue, size, 0)
        if drop:
            continue
        if waiting[one] or waiting[other]:
            waiting[one] = True
            waiting[other] = True
            continue
        if length[one] < length[other]:
            one, other = other, one
        parent[other] = one
        name[one] = min(name[one], name[other])
        _remove(keys, found, _find(keys, np.int64(min(one, other)) * regions + max(one, other)))
        counts[edge] = 0
        end = first[other]
        while end >= 0:
            after = following[end]
            theirs = end >> 1
            if counts[theirs]:
                third = _slot(parent, ones[theirs] if end & 1 else others[theirs])
                _remove(
                    keys,
                    found,
                    _find(keys, np.int64(min(other, third)) * regions + max(other, third)),
                )
                key = np.int64(min(one, third)) * regions + max(one, third)
                place = _find(keys, key)
                stays = theirs
                if keys[place] == key:
                    # Two edges to a common neighbour become one. The better of them stays: its
                    # place in the queue is not behind that of their sum.
                    own = found[place]
                    if mean_of(sums[own], counts[own]) >= mean_of(sums[theirs], counts[theirs]):
                        stays = own
                    gone = theirs if stays == own else own
                    sums[stays] += sums[gone]
                    counts[stays] += counts[gone]
                    counts[gone] = 0
                keys[place] = key
                found[place] = stays
                if stays == theirs:
                    following[end] = -1
                    if last[one] < 0:
                        first[one] = end
                    else:
                        following[last[one]] = end
                    last[one] = end
                    length[one] += 1
            end = after
        first[other] = -1
    joined = np.empty(regions, np.int32)
    wholes = np.zeros(regions, np.bool_)
    for region in range(regions):
        slot = _slot(parent, region)
        joined[region] = name[slot]
        wholes[name[slot]] = waiting[slot]
    waiting[:] = wholes
    return joined


@_compile
def clear_numbers(values: NDArray[np.float32], none: float, least: float) -> None:
    """Replace what is no number by ``none``, and what is less than ``least`` by that, in place."""
    channels, nz, ny, nx = values.shape
    for channel in range(channels):
        for z in range(nz):
            for y in range(ny):
                for x in range(nx):
                    value = values[channel, z, y, x]
                    if np.isnan(value):
                        values[channel, z, y, x] = none
                    elif value < least:
                        values[channel, z, y, x] = least


@_compile
def _root(parents: NDArray[np.uint32], voxel: Whole) -> Whole:
    while parents[voxel] != voxel:
        parents[voxel] = parents[parents[voxel]]
        voxel = np.int64(parents[voxel])
    return voxel


@_compile
def _join_before(parents: NDArray[np.uint32], root: Whole, voxel: Whole, before: Whole) -> Whole:
    """Join a voxel, which has no parent yet, to one before it; return the root of both.

    Args:
        parents: the parent of each voxel before, which is never behind it.
        root: the root that the voxel has so far; the voxel itself for none.
        voxel: the voxel.
        before: the voxel before it.
    """
    other = _root(parents, before)
    if other > root:
        parents[other] = root
        return root
    if other < root and root != voxel:
        parents[root] = other
    return other


@_compile
def label_basins(  # noqa: C901, PLR0912, PLR0915 - see above
    along_z: AnyArray,
    along_y: AnyArray,
    along_x: AnyArray,
    low: float,
    high: float,
    none: float,
    choice: NDArray[np.uint8],
) -> tuple[NDArray[np.uint32], int]:
    """Label what is joined by the greatest edge of a voxel, or by an edge of ``high`` or more.

    Args:
        along_z: links along z, one more than voxels, as along y and x.
        along_y: links along y.
        along_x: links along x.
        low: the least affinity of an edge that a voxel chooses.
        high: the least affinity of an edge that joins in any case, at least ``low``.
        none: what a link is where there is no edge; all three are of the links' dtype.
        choice: the result for each voxel (z, y, x): 1 and 2 for the edge to the next and the
            previous voxel along z, 4 and 8 along y, 16 and 32 along x, 0 for none.

    Returns:
        Labels in the order of first voxels, 0 where no edge was chosen; and their count.
    """
    nz, ny, nx = choice.shape
    # The parent of each voxel is never behind it, so labels can take the parents' place in order.
    labels = np.empty(nz * ny * nx, np.uint32)
    voxel = -1
    for z in range(nz):
        for y in range(ny):
            for x in range(nx):
                voxel += 1
                # Of equal affinities the first stays.
                best = none
                chosen = 0
                link = along_x[z, y, x + 1]
                if link > best and link >= low:
                    best = link
                    chosen = 16
                link = along_x[z, y, x]
                if link > best and link >= low:
                    best = link
                    chosen = 32
                link = along_y[z, y + 1, x]
                if link > best and link >= low:
                    best = link
                    chosen = 4
                link = along_y[z, y, x]
                if link > best and link >= low:
                    best = link
                    chosen = 8
                link = along_z[z + 1, y, x]
                if link > best and link >= low:
                    best = link
                    chosen = 1
                link = along_z[z, y, x]
                if link > best and link >= low:
                    chosen = 2
                choice[z, y, x] = chosen
                root = voxel
                if x and (chosen == 32 or choice[z, y, x - 1] == 16 or along_x[z, y, x] >= high):
                    root = _join_before(labels, root, voxel, voxel - 1)
                if y and (chosen == 8 or choice[z, y - 1, x] == 4 or along_y[z, y, x] >= high):
                    root = _join_before(labels, root, voxel, voxel - nx)
                if z and (chosen == 2 or choice[z - 1, y, x] == 1 or along_z[z, y, x] >= high):
                    root = _join_before(labels, root, voxel, voxel - ny * nx)
                labels[voxel] = root
    count = 0
    choices = choice.reshape(-1)
    for voxel in range(len(labels)):
        if not choices[voxel]:
            labels[voxel] = 0
        elif labels[voxel] == voxel:
            count += 1
            labels[voxel] = count
        else:
            labels[voxel] = labels[labels[voxel]]
    return labels.reshape(choice.shape), count


@_compile
def measure_labels(
    labels: NDArray[np.uint32],
    places: Ints,
    voxels: Ints,
    start: Ints,
    stop: Ints,
    sums: NDArray[np.float64],
) -> None:
    """Count, box and sum the voxels of each label, and find its first one, in C order.

    Args:
        labels: (z, y, x), all of ``1 … count`` are in use.
        places: the result for label ``k`` at ``k - 1``, as of all that follow: the first voxel.
        voxels: number of voxels; 0 before.
        start: (count, 3), the least coordinates.
        stop: (count, 3), one more than the greatest.
        sums: (count, 3), sums of coordinates; 0 before.
    """
    nz, ny, nx = labels.shape
    for z in range(nz):
        for y in range(ny):
            x = 0
            while x < nx:
                label = labels[z, y, x]
                begin = x
                x += 1
                while x < nx and labels[z, y, x] == label:
                    x += 1
                if not label:
                    continue
                k = np.int64(label) - 1
                length = x - begin
                if not voxels[k]:
                    places[k] = (z * ny + y) * nx + begin
                    start[k, 0] = z
                    start[k, 1] = y
                    start[k, 2] = begin
                    stop[k, 1] = y + 1
                    stop[k, 2] = x
                else:
                    start[k, 1] = min(start[k, 1], y)
                    start[k, 2] = min(start[k, 2], begin)
                    stop[k, 1] = max(stop[k, 1], y + 1)
                    stop[k, 2] = max(stop[k, 2], x)
                stop[k, 0] = z + 1
                voxels[k] += length
                sums[k, 0] += z * length
                sums[k, 1] += y * length
                sums[k, 2] += (begin + x - 1) * length // 2


@_compile
def add_parts(
    which: Ints,
    voxels: Ints,
    first: Ints,
    start: Ints,
    stop: Ints,
    sums: NDArray[np.float64],
    more_voxels: Ints,
    more_first: Ints,
    more_start: Ints,
    more_stop: Ints,
    more_sums: NDArray[np.float64],
) -> None:
    """Add parts to objects, in place: see :func:`~beam_inference.segmentation.records.add_parts`.

    Args:
        which: the place of each part's object.
        voxels: of the objects, as all fields that follow.
        first: their first voxels.
        start: (objects, 3), where their boxes begin.
        stop: (objects, 3), where they end.
        sums: (objects, 3), sums of coordinates.
        more_voxels: of the parts, as all fields that follow.
        more_first: their first voxels.
        more_start: (parts, 3), where their boxes begin.
        more_stop: (parts, 3), where they end.
        more_sums: (parts, 3), sums of coordinates.
    """
    for part in range(len(which)):
        place = which[part]
        voxels[place] += more_voxels[part]
        first[place] = min(first[place], more_first[part])
        for axis in range(3):
            start[place, axis] = min(start[place, axis], more_start[part, axis])
            stop[place, axis] = max(stop[place, axis], more_stop[part, axis])
            sums[place, axis] += more_sums[part, axis]


@_compile
def renumber(labels: NDArray[np.uint32], numbers: AnyArray, result: AnyArray) -> None:
    """Write the number of each label into an array of the same shape, which may be the labels'."""
    flat = labels.reshape(-1)
    numbered = result.reshape(-1)
    for voxel in range(len(flat)):
        numbered[voxel] = numbers[flat[voxel]]


@_compile
def _row_of(table: Ints, key: Whole) -> Whole:
    """The row of a key in a table of keys, sums and counts, or the free one where it would be."""
    mask = len(table) - 1
    row = _hash(key, mask)
    while table[row, 0] != key and table[row, 0] != -1:
        row = (row + 1) & mask
    return row


@_compile
def _grow(table: Ints) -> Ints:
    """Copy a table into one with twice the rows."""
    more = np.full((2 * len(table), 3), -1, np.int64)
    for row in range(len(table)):
        if table[row, 0] >= 0:
            more[_row_of(more, table[row, 0])] = table[row]
    return more


@_compile
def _add(
    table: Ints,
    found: tuple[Whole, Whole],
    one: Whole,
    other: Whole,
    names: Whole,
    link: float,
    limits: tuple[float, float, float],
) -> tuple[tuple[Whole, Whole], Whole]:
    """Add an edge to a table with room for it, unless it is none between two; 0 is background.

    Args:
        table: keys, sums and counts.
        found: the key and the row that were found before: the next voxels often have the same.
        one: the one label.
        other: the other label.
        names: more than any label.
        link: the affinity.
        limits: see :func:`touching_labels`.

    Returns:
        The key and the row of now; and 1 for the first edge of a pair, else 0.
    """
    none, most, scale = limits
    if other == one or not other or not one or not link > none:
        return found, 0
    key = np.int64(min(one, other)) * names + np.int64(max(one, other))
    row = found[1]
    is_new = 0
    if key != found[0]:
        row = _row_of(table, key)
        if table[row, 0] != key:
            is_new = 1
            table[row, 0] = key
            table[row, 1] = 0
            table[row, 2] = 0
    table[row, 1] += np.int64(np.rint(min(max(float(link), -most), most) * scale))
    table[row, 2] += 1
    return (key, row), is_new


_NOTHING_FOUND = (-1, -1)


@_compile
def touching_labels(
    labels: NDArray[np.uint32],
    count: Whole,
    links: tuple[AnyArray, AnyArray, AnyArray],
    limits: tuple[float, float, float],
) -> Ints:
    """Sum the affinities between the voxels of touching labels of a chunk.

    Args:
        labels: (z, y, x); 0 is background.
        count: number of labels.
        links: links along z, y and x, the first of them to the voxels before the chunk.
        limits: what a link is where there is no edge; affinities are clipped to plus or minus the
            second, multiplied by the third, and rounded.

    Returns:
        (pairs, 3), in any order: ``lesser label * (count + 1) + greater label``, the sum, the
        count.
    """
    nz, ny, nx = labels.shape
    along_z, along_y, along_x = links
    names = count + 1
    table = np.full((1024, 3), -1, np.int64)
    pairs = 0
    for z in range(nz):
        for y in range(ny):
            while 2 * (pairs + 3 * nx) > len(table):
                table = _grow(table)
            at_z = at_y = at_x = _NOTHING_FOUND
            for x in range(nx):
                own = labels[z, y, x]
                if not own:
                    continue
                if x:
                    link = along_x[z, y, x]
                    at_x, new = _add(table, at_x, own, labels[z, y, x - 1], names, link, limits)
                    pairs += new
                if y:
                    link = along_y[z, y, x]
                    at_y, new = _add(table, at_y, own, labels[z, y - 1, x], names, link, limits)
                    pairs += new
                if z:
                    link = along_z[z, y, x]
                    at_z, new = _add(table, at_z, own, labels[z - 1, y, x], names, link, limits)
                    pairs += new
    return table[table[:, 0] >= 0]


@_compile
def touching_planes(
    ones: Places,
    others: Places,
    names: Whole,
    links: AnyArray,
    limits: tuple[float, float, float],
) -> Ints:
    """Sum the affinities between the voxels of two planes, one on each side of a seam.

    Args:
        ones: the name of each voxel of the one plane; 0 is background.
        others: likewise, of the other plane.
        names: more than any name.
        links: the links between them.
        limits: as in :func:`touching_labels`.

    Returns:
        (pairs, 3), in any order: ``lesser name * names + greater name``, the sum, the count.
    """
    height, width = ones.shape
    table = np.full((1024, 3), -1, np.int64)
    pairs = 0
    for y in range(height):
        while 2 * (pairs + width) > len(table):
            table = _grow(table)
        at = _NOTHING_FOUND
        for x in range(width):
            at, new = _add(table, at, ones[y, x], others[y, x], names, links[y, x], limits)
            pairs += new
    return table[table[:, 0] >= 0]
