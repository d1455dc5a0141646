"""Reading job files and prices from anywhere, and writing a chunk shape into a job file.

They are read through TensorStore's key-value stores, as volumes and receipts are: everything that a
job touches has the same settings, and its credentials are looked for in the same places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from beam_inference.config.cohort import (
    VOLUMES,
    Cohort,
    Row,
    parse_cohort,
    parse_table,
    rows_of_list,
)
from beam_inference.config.fields import Json
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import (
    absolute_path,
    parse_job,
    parse_job_text,
    parse_job_values,
)
from beam_inference.config.steps import STEPS, CommandLine, Step, Steps, split_steps
from beam_inference.config.storage import check_url
from beam_inference.config.yaml_text import parse_yaml
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.kvstores import LOCAL, read_file, storage_of_environment, url_of

if TYPE_CHECKING:
    from beam_inference.launch.cost import Prices

_LISTED = 10
"""Most names of volumes that a message lists."""


def load_job(
    path: str | Path,
    overrides: Sequence[str] = (),
    volume: str | None = None,
    step: str | None = None,
) -> JobConfig:
    """Read a job file from a path or URL and apply ``key.key=value`` overrides (values are YAML).

    Paths without a scheme, in the file as in overrides, are relative to the job file's folder.
    Storage settings that the job leaves open are taken from the environment, see
    :func:`beam_inference.volumes.kvstores.storage_of_environment`.

    Args:
        path: path or URL of the job file.
        overrides: changes to its keys, such as ``output.path=gs://bucket/out``.
        volume: the volume whose job is wanted, of a job file with several.
        step: the step that is the job wanted, of a job file with several.

    Returns:
        The job, with absolute paths.

    Raises:
        ConfigError: the file is absent or no YAML, or the job is not valid; the message names every
            fault. Or it has several volumes or steps, and none is named.
    """
    return job_of_volume(load_jobs(path, overrides, step), volume, str(path))


def job_of_volume(jobs: JobConfig | Cohort, volume: str | None, source: str) -> JobConfig:
    """The job of one volume.

    Args:
        jobs: a job of one volume, or of several.
        volume: the volume, of several.
        source: name of the job file, for messages.

    Raises:
        ConfigError: there are several, and none of them is named; or there is one, and it is.
    """
    if isinstance(jobs, Cohort):
        if volume is None:
            raise ConfigError(
                f"{source} has several volumes, and this is for one: name it with --volume, one of "
                f"{', '.join([*jobs.volumes][:_LISTED])}{' …' * (len(jobs.volumes) > _LISTED)}"
            )
        return jobs.of(volume)
    if volume is not None:
        raise ConfigError(f"--volume {volume}: {source} has no key {VOLUMES}: leave it out")
    return jobs


def load_jobs(
    path: str | Path, overrides: Sequence[str] = (), step: str | None = None
) -> JobConfig | Cohort:
    """Read a job of one volume, or of several; see :func:`load_job`."""
    loaded = load_job_file(path, overrides, step)
    return loaded.job(step) if isinstance(loaded, Steps) else loaded


def load_job_file(
    path: str | Path, overrides: Sequence[str] = (), step: str | None = None
) -> JobConfig | Cohort | Steps:
    """Read a job file: a job of one volume or of several, or all the steps that it has.

    Args:
        path: path or URL of the job file.
        overrides: changes to its keys, for every job in it.
        step: the step whose job they are for alone; None for all.

    Raises:
        ConfigError: as in :func:`load_job`; or there is no such step.
    """
    url = str(path)
    check_url(url, "the job file")
    try:
        if "://" in url:
            folder: str | Path = url.rpartition("/")[0]
            text = read_file(url, storage_of_environment(LOCAL)).decode()
        else:
            folder = Path(url).absolute().parent
            text = Path(url).read_text()
    except VolumeError as error:
        raise ConfigError(f"cannot read the job file: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the job file {url}: {getattr(error, 'strerror', None) or error}"
        ) from None
    values = parse_job_values(text, url)
    if isinstance(values, dict) and STEPS in values:
        return _parse_steps(values, folder, url, overrides, step)
    if step is not None:
        raise ConfigError(f"--step {step}: {url} has no key {STEPS}: leave it out")
    if not isinstance(values, dict) or VOLUMES not in values:
        return _with_storage(parse_job_text(text, folder, url, overrides))
    return _parse_volumes(values, folder, url, overrides)


def _parse_steps(
    values: Json, folder: str | Path, source: str, overrides: Sequence[str], only: str | None
) -> Steps:
    steps: dict[str, Step] = {}
    for name, said in split_steps(values, source, overrides, only).items():
        where = f"{source}, step {name}"
        if isinstance(said, tuple):
            steps[name] = CommandLine(said, folder)
        elif VOLUMES in said:
            steps[name] = _parse_volumes(said, folder, where, ())
        else:
            steps[name] = _with_storage(parse_job(said, folder, where))
    loaded = Steps(steps, source)
    if only is not None:
        loaded.of(only)
    return loaded


def _parse_volumes(
    values: Json, folder: str | Path, source: str, overrides: Sequence[str]
) -> Cohort:
    rows = _find_rows(values.pop(VOLUMES), folder, source)
    cohort = parse_cohort(values, rows, folder, source, overrides)
    volumes = {name: _with_storage(job) for name, job in cohort.volumes.items()}
    return replace(cohort, volumes=volumes)


def _with_storage(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"storage": storage_of_environment(job.storage)})


def _find_rows(listed: object, folder: str | Path, source: str) -> list[Row]:
    """The rows of a job file of several volumes: listed there, in a table, or found by a pattern.

    Raises:
        ConfigError: it names none.
    """
    if isinstance(listed, list):
        return rows_of_list(listed, source)
    if not isinstance(listed, str):
        raise ConfigError(
            f"{source}: {VOLUMES}: expected a list, a CSV file, or a pattern such as scans/*.zarr"
        )
    path = absolute_path(listed, folder)
    if path.endswith(".csv"):
        check_url(path, VOLUMES)
        try:
            text = read_file(url_of(path), storage_of_environment(LOCAL)).decode("utf-8-sig")
        except (VolumeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: {VOLUMES}: cannot read {path}: {error}") from None
        return parse_table(text, path)
    if "://" in path or not any(sign in path for sign in "*?["):
        raise ConfigError(
            f"{source}: {VOLUMES}: {listed} is neither a CSV file (….csv) nor a pattern of local "
            "paths, such as scans/*.zarr. List volumes in a bucket in a table"
        )
    found = sorted(glob(path))
    if not found:
        raise ConfigError(f"{source}: {VOLUMES}: nothing is called {path}")
    return [{"input": each} for each in found]


def load_prices(path: str) -> Prices:
    """Read prices from a YAML file, a path or URL.

    Raises:
        ConfigError: the file is absent, or holds something else.
    """
    from beam_inference.launch.cost import Prices  # slow to import

    url = url_of(path)
    try:
        text = read_file(url, storage_of_environment(LOCAL)).decode()
        return Prices.model_validate(parse_yaml(text) or {})
    except VolumeError as error:
        raise ConfigError(f"cannot read the prices: {error}") from None
    except (ValidationError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(
            f"{path} is not a valid price file: {describe_error(error, with_type=False)}"
        ) from None


_CHUNK_SHAPE = re.compile(
    r"""(\bchunk_shape["']?\s*:\s*)(\[[^\]]*\]|(?:\n\s*-[^\n]*){3}|[\w"']+)"""
)


def set_chunk_shape(path: str, chunk_shape: Zyx) -> None:
    """Write a chunk shape into a local job file; the rest of it stays as it is, with its comments.

    Args:
        path: path of the job file.
        chunk_shape: the chunk shape, voxels ZYX.

    Raises:
        ConfigError: the file is not local, or its chunk shape cannot be located.
    """
    if "://" in path:
        raise ConfigError(
            f"{path} is not a local file: set inference.chunk_shape to {list(chunk_shape)} there"
        )
    file = Path(path)
    text, count = _CHUNK_SHAPE.subn(
        lambda match: f"{match[1].rstrip()} {list(chunk_shape)}", file.read_bytes().decode()
    )
    written = yaml.safe_load(text) if count == 1 else None
    if not isinstance(written, dict) or written.get("inference", {}).get("chunk_shape") != list(
        chunk_shape
    ):
        raise ConfigError(
            f"cannot find inference.chunk_shape in {path}: write {list(chunk_shape)} there"
        )
    file.write_bytes(text.encode())
