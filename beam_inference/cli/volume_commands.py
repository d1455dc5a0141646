"""What the commands on volumes do, once their words are parsed."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from beam_inference.cli.commands import check_picture
from beam_inference.errors import COMPLETE, ConfigError


def convert(known: argparse.Namespace) -> int:
    """Convert a volume from one format into another."""
    from beam_inference.conversion.convert import Request
    from beam_inference.conversion.convert import convert as converted
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment

    request = Request(
        source=known.source,
        target=known.target,
        format=known.format,
        dataset=known.dataset,
        scale=known.scale,
        block_shape=known.block_shape,
        shard_shape=known.shard_shape,
        encoding=known.encoding,
        labels=known.labels,
        voxel_size_nm=known.voxel_size,
        offset=known.offset,
        drop=tuple(filter(None, known.drop.split(","))),
        overwrite=known.overwrite,
        storage=storage_of_environment(LOCAL),
    )
    return converted(request, known.beam_flags, shlex.join(known.words))


def pyramid(known: argparse.Namespace) -> int:
    """Make coarser levels of a volume."""
    from beam_inference.beam.stage_runner import check_place, print_task_outcome
    from beam_inference.cli.plan_text import print_pyramid
    from beam_inference.pyramid.pyramid import make_pyramid, plan_pyramid
    from beam_inference.pyramid.scales import multiscale_volume
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of

    if known.json and not known.dry_run:
        raise ConfigError("--json tells what would be made: give it with --dry-run")
    url = url_of(known.volume)
    check_place(known.beam_flags, [url])
    if url.startswith("http"):
        raise ConfigError(
            f"{url}: http(s):// can only be read from; levels are written beside their volume"
        )
    volume = multiscale_volume(url, storage_of_environment(LOCAL), known.scale)
    planned = plan_pyramid(volume, known.method, known.factor, known.levels)
    print_pyramid(planned, as_json=known.json)
    if known.dry_run:
        return COMPLETE
    sys.stdout.flush()
    outcome = make_pyramid(planned, known.beam_flags, overwrite=known.overwrite)
    print_task_outcome(
        outcome, f"{url}, with {len(planned.levels)} more levels", shlex.join(known.words)
    )
    return outcome.exit_code


def thumbnail(known: argparse.Namespace) -> int:
    """Draw planes of a coarse level."""
    from beam_inference.pyramid.thumbnail import thumbnail as drawn
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of

    check_picture(known.to)
    print(drawn(url_of(known.volume), storage_of_environment(LOCAL), Path(known.to), known.planes))
    return COMPLETE


def components(known: argparse.Namespace) -> int:
    """Label the connected components of a volume."""
    from beam_inference.segmentation.component_job import components_described, planned_components
    from beam_inference.segmentation.component_stages import component_stages
    from beam_inference.segmentation.make_labels import make_labels

    work = planned_components(
        *_source_and_target(known),
        threshold=known.threshold,
        channel=known.channel,
        connectivity=known.connectivity,
        **_labels_asked(known),
    )
    return make_labels(
        work, components_described(work), component_stages, known.beam_flags, **_how(known)
    )


def segment(known: argparse.Namespace) -> int:
    """Segment a volume of affinities."""
    from beam_inference.segmentation.make_labels import make_labels
    from beam_inference.segmentation.segment_job import (
        planned_segmentation,
        segmentation_described,
    )
    from beam_inference.segmentation.segment_stages import segment_stages

    work = planned_segmentation(
        *_source_and_target(known),
        threshold=known.threshold,
        low=known.low,
        high=known.high,
        channels=known.channels,
        to_next=known.to_next,
        **_labels_asked(known),
    )
    return make_labels(
        work, segmentation_described(work), segment_stages, known.beam_flags, **_how(known)
    )


def _source_and_target(known: argparse.Namespace) -> tuple[str, str]:
    from beam_inference.beam.stage_runner import check_place
    from beam_inference.volumes.kvstores import url_of

    source = url_of(known.source)
    target = url_of(known.target)
    check_place(known.beam_flags, [source, target])
    if target.startswith("http"):
        raise ConfigError(
            f"{target}: http(s):// can only be read from; write to a local folder, gs:// or s3://"
        )
    return source, target


def _labels_asked(known: argparse.Namespace) -> dict[str, Any]:
    from beam_inference.segmentation.layout import Layout
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment

    names = ("format", "chunk_shape", "block_shape", "shard_shape")
    layout = Layout(**{name: getattr(known, name) for name in names})
    storage = storage_of_environment(LOCAL)
    return {"scale": known.scale, "min_size": known.min_size, "layout": layout, "storage": storage}


def _how(known: argparse.Namespace) -> dict[str, Any]:
    again = shlex.join(word for word in known.words if word != "--overwrite")
    return {"again": again, "overwrite": known.overwrite, "pyramid": known.pyramid}


def levels(known: argparse.Namespace) -> int:
    """Count a volume's values."""
    from beam_inference.beam.stage_runner import (
        begin,
        check_place,
        print_task_outcome,
        run_tasks,
        task_job,
    )
    from beam_inference.operators.level_counts import (
        CountValues,
        SumCounts,
        chunks_to_count,
        described,
    )
    from beam_inference.volumes.kvstores import (
        LOCAL,
        delete_folder,
        open_kvstore,
        read_key,
        storage_of_environment,
        url_of,
    )
    from beam_inference.volumes.opening import open_volume

    storage = storage_of_environment(LOCAL)
    path = url_of(known.volume)
    to = url_of(known.to)
    check_place(known.beam_flags, [path, to])
    channel = None if known.channel is None else tuple(known.channel)
    volume = open_volume(path, scale=known.scale, channel=known.channel, storage=storage)
    chunks = chunks_to_count(volume)
    counting = CountValues(path, known.scale, channel, storage, f"{to}.parts/counts", chunks)
    folder, _, name = to.rpartition("/")
    job = task_job(
        "levels",
        described(path, known.scale, channel, volume),
        f"{to}.parts",
        storage,
        [counting, SumCounts(counting, (folder, name))],
    )
    gone = read_key(open_kvstore(folder, storage), name, folder) is None
    begin(job, overwrite=known.overwrite or gone)
    outcome = run_tasks(job, known.beam_flags, chunks.roi.size / chunks.count)
    if outcome.exit_code == COMPLETE:
        delete_folder(open_kvstore(counting.counts_url, storage), counting.counts_url)
    print_task_outcome(
        outcome, to, shlex.join(word for word in known.words if word != "--overwrite")
    )
    return outcome.exit_code
