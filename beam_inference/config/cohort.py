"""A job file of several volumes: what each row says instead of the rest of the file.

Each row becomes a job of its own, with a state folder inside the one that all share. What rows may
say is where voxels are and what they mean; network, inference and operators are those of all.
"""

from __future__ import annotations

import copy
import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from beam_inference.config.fields import Json, unknown_key_hint
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import override_value, parse_job
from beam_inference.config.places import places_of_job, real_place
from beam_inference.config.yaml_text import parse_yaml
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import shorten_text, shorten_value

Row: TypeAlias = Mapping[str, Any]
"""What one volume has instead of the rest of the job file, by key; its name is under ``name``."""

VOLUMES = "volumes"
"""The key of the job file that lists rows."""

MOST_VOLUMES = 100_000

_PATHS = ("input", "output", "mask")
_SECTIONS = ("input", "inputs", "output", "outputs", "mask", "roi")
_MODEL_KEYS = ("normalize", "voxel_size_nm")
_COLUMNS = ("name", *_SECTIONS, *_MODEL_KEYS, "model")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_SUFFIXES = re.compile(r"(\.ome)?\.(zarr|n5|precomputed)$")
_BOX = re.compile(r"\s*[,\s]\s*".join([r"(-?\d{1,18}):(-?\d{1,18})"] * 3))


@dataclass(frozen=True, slots=True)
class Cohort:
    """A job of several volumes.

    Attributes:
        volumes: the job of each volume, by its name, in the order of the rows.
        state_url: the state folder that they share; that of a volume lies inside it.
    """

    volumes: Mapping[str, JobConfig]
    state_url: str

    def of(self, name: str) -> JobConfig:
        """The job of one volume.

        Raises:
            ConfigError: there is no such volume.
        """
        if name not in self.volumes:
            raise ConfigError(
                f"--volume {shorten_text(name)}: the job file has no such volume; "
                f"{unknown_key_hint(name, list(self.volumes)[:20])}"
            )
        return self.volumes[name]


def volume_state_url(state_url: str, name: str) -> str:
    """URL of the state folder of one volume of a job of several.

    Args:
        state_url: the state folder of the job.
        name: of the volume.
    """
    return f"{state_url.rstrip('/')}/volumes/{name}"


def shared_state_url(url: str) -> str | None:
    """The state folder of the job of which a folder is that of one volume; None of other folders.

    It tells by the path, as :func:`volume_state_url` makes it.
    """
    shared, separator, name = url.rstrip("/").rpartition("/volumes/")
    return shared if separator and "/" not in name else None


def parse_cohort(
    values: Json,
    rows: Sequence[Row],
    folder: str | Path,
    source: str,
    overrides: Sequence[str] = (),
) -> Cohort:
    """Make the job of each volume.

    Args:
        values: the job file, without the key ``volumes``.
        rows: what each volume has instead.
        folder: a path or a URL; relative paths start from it.
        source: name of the job file, for messages.
        overrides: ``key.key=value`` each; they replace what file and rows say.

    Raises:
        ConfigError: a row is wrong, or two volumes would write into one place.
    """
    if not rows:
        raise ConfigError(f"{source}: {VOLUMES} lists no volume")
    if len(rows) > MOST_VOLUMES:
        raise ConfigError(f"{source}: {VOLUMES} has {len(rows)} rows, at most {MOST_VOLUMES}")
    jobs: dict[str, JobConfig] = {}
    state_url = ""
    for number, row in enumerate(rows, 1):
        name = _name_of(row, f"{source}: {VOLUMES}, row {number}")
        where = f"{source}, volume {name}"
        if name in jobs:
            raise ConfigError(
                f"{source}: {VOLUMES}: two volumes are called {name}: give each a name"
            )
        single = _with_row(values, row, name, where)
        for override in overrides:
            override_value(single, override)
        job = parse_job(single, folder, where)
        state_url = _check_single(job, where)
        update = {"state_path": volume_state_url(state_url, name)}
        jobs[name] = job.model_copy(update={"job": job.job.model_copy(update=update)})
    _check_apart(jobs, source)
    return Cohort(jobs, state_url)


def _check_single(job: JobConfig, where: str) -> str:
    """Check what the job of a volume may not have; the state folder of all."""
    if job.job.state_path is None:
        raise ConfigError(
            f"{where}: job.state_path is missing: a job of several volumes has its state in a "
            "folder of its own. Write, for example, job: {state_path: state}"
        )
    if any(single.output.pyramid is not None for single in job.by_output.values()):
        raise ConfigError(
            f"{where}: output.pyramid is for jobs of one volume: remove it, and give the command "
            "beam-inference pyramid for each output"
        )
    if job.inference.precision == "int8":
        raise ConfigError(
            f"{where}: precision: int8 is calibrated on one volume, and this job has several: "
            "write precision: float32"
        )
    if job.inference.mixed_devices:
        raise ConfigError(
            f"{where}: inference.mixed_devices is for jobs of one volume: all volumes are done by "
            "one engine, so remove it"
        )
    if job.inference.members > 1:
        raise ConfigError(
            f"{where}: inference.partition is for jobs of one volume, as yet: remove it, or give "
            "each volume a job of its own"
        )
    return job.job.state_path


def _name_of(row: Row, where: str) -> str:
    name = row.get("name")
    if name is None:
        section = row.get("input")
        path = section.get("path") if isinstance(section, Mapping) else section
        if not isinstance(path, str):
            raise ConfigError(f"{where}: give a name, or the path of its input")
        name = _SUFFIXES.sub("", path.rstrip("/").rpartition("/")[2])
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a name of a volume has letters, digits, _ . and -, and begins with a letter "
            f"or digit; found {shorten_value(name)}. Write one under name"
        )
    return name


def _with_row(values: Json, row: Row, name: str, where: str) -> Json:
    """The job file of one volume; ``{name}`` in paths is replaced."""
    single = copy.deepcopy(values)
    for key, value in row.items():
        if key == "name":
            continue
        _put(single, key, value, where)
    for key in _SECTIONS:
        if key in single:
            single[key] = _with_name(single[key], name)
    return single


def _put(single: Json, key: str, value: Any, where: str) -> None:
    """Put what a row says under a key into the job of its volume."""
    first, *rest = key.split(".")
    if first in _MODEL_KEYS and not rest:
        first, rest = "model", [first]
    is_of_model = first == "model" and (rest or isinstance(value, Mapping))
    named = [rest[0]] if rest else list(value) if is_of_model else []
    is_known = first in _SECTIONS or (is_of_model and all(part in _MODEL_KEYS for part in named))
    if not is_known:
        raise ConfigError(
            f"{where}: {shorten_text(key)} is no key that a volume may have for itself; a volume "
            f"has {', '.join(_COLUMNS[:-1])}. What all share stands in the job file itself"
        )
    if not rest and first in _PATHS and isinstance(value, str):
        rest = ["path"]
    for part in reversed(rest):
        value = {part: value}
    merge_values(single, first, value)


def merge_values(into: Json, key: str, value: Any) -> None:
    """Put a value under a key; of a mapping only what it has replaces what is there."""
    before = into.get(key)
    if isinstance(value, Mapping) and isinstance(before, dict):
        for inner, each in value.items():
            merge_values(before, inner, each)
    else:
        into[key] = copy.deepcopy(value)


def _with_name(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value.replace("{name}", name)
    if isinstance(value, dict):
        return {key: _with_name(each, name) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_name(each, name) for each in value]
    return value


def _check_apart(jobs: Mapping[str, JobConfig], source: str) -> None:
    """Refuse volumes of which one would write into another, or into what another reads."""
    used = list(_used_places(jobs))
    written: dict[str, set[str]] = defaultdict(set)
    read: dict[str, set[str]] = defaultdict(set)
    for place, name, is_written in used:
        (written if is_written else read)[place].add(name)
    for place, name, is_written in used:
        parts = place.split("/")
        for depth in range(1, len(parts) + 1):
            around = "/".join(parts[:depth])
            others = written[around] | (read[around] if is_written else set())
            if others := others - {name}:
                raise ConfigError(
                    f"{source}: the volumes {name} and {min(others)} both use {around}, and one "
                    "writes there: give each an output of its own, such as "
                    "output: {path: out/{name}}"
                )


def _used_places(jobs: Mapping[str, JobConfig]) -> Iterator[tuple[str, str, bool]]:
    """The places that volumes read and write: place, volume, whether it is written."""
    for name, job in jobs.items():
        places = places_of_job(job)
        for url in places.written:
            yield real_place(url), name, True
        for url in places.read:
            yield real_place(url), name, False


def parse_table(text: str, source: str) -> list[Row]:
    """Read the rows of a CSV table, whose header names keys: of a volume's box, paths and sizes.

    Empty cells say nothing. ``roi`` is written ``z0:z1,y0:y1,x0:x1``, all other values that are not
    paths as in YAML.

    Args:
        text: of the file.
        source: its name, for messages.

    Raises:
        ConfigError: it is no such table.
    """
    try:
        lines = [line for line in csv.reader(io.StringIO(text), strict=True) if any(line)]
    except csv.Error as error:
        raise ConfigError(f"{source} is no CSV: {error}") from None
    if not lines:
        raise ConfigError(f"{source} is empty: expected a header, such as name,input,output")
    header = [cell.strip() for cell in lines[0]]
    if len(set(header)) < len(header):
        raise ConfigError(f"{source}: two columns of the header have one name")
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise ConfigError(
                f"{source}, row {number}: {len(line)} cells, the header has {len(header)}. A box "
                'is written with quotes: "0:64,0:512,0:512"'
            )
        cells = zip(header, (cell.strip() for cell in line), strict=True)
        where = f"{source}, row {number}"
        rows.append({key: _cell(key, cell, where) for key, cell in cells if cell})
    return rows


def _cell(key: str, cell: str, where: str) -> Any:
    """The value of a cell of a table."""
    if key == "name" or key in _PATHS or key.endswith("path"):
        return cell
    if key == "roi":
        found = _BOX.fullmatch(cell)
        if found is None:
            raise ConfigError(
                f"{where}: roi: expected z0:z1,y0:y1,x0:x1; found {shorten_text(cell)}"
            )
        numbers = list(map(int, found.groups()))
        return {"start": numbers[::2], "stop": numbers[1::2]}
    try:
        return parse_yaml(cell)
    except ConfigError as error:
        raise ConfigError(f"{where}: {shorten_text(key)}: {error}") from None


def rows_of_list(listed: Sequence[object], source: str) -> list[Row]:
    """Read the rows that a job file lists itself: paths of inputs, or mappings.

    Raises:
        ConfigError: one is neither.
    """
    rows: list[Row] = []
    for number, each in enumerate(listed, 1):
        if isinstance(each, str):
            rows.append({"input": each})
        elif isinstance(each, dict) and all(isinstance(key, str) for key in each):
            rows.append(each)
        else:
            raise ConfigError(
                f"{source}: {VOLUMES}.{number - 1}: expected the path of an input, or a mapping of "
                f"{', '.join(_COLUMNS[:-1])}; found {shorten_value(each)}"
            )
    return rows


def job_schema() -> Json:
    """JSON schema of a job file: of one volume, of several, or of several steps."""
    schema = JobConfig.model_json_schema()
    required = schema.pop("required")
    schema["properties"][VOLUMES] = {
        "title": "Volumes",
        "description": (
            "several volumes: paths of inputs or mappings of what each has for itself, a pattern "
            "of paths, or a CSV file"
        ),
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": ["string", "object"]}},
        ],
    }
    shared = [key for key in required if key not in ("input", "output")]
    schema["properties"]["steps"] = {
        "title": "Steps",
        "description": "jobs, by their keys, and commands, by a line of text, done in this order",
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"type": ["string", "object"]},
    }
    schema["anyOf"] = [
        {"required": required},
        {"required": [*shared, VOLUMES]},
        {"required": ["steps"]},
    ]
    return schema
