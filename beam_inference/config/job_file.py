"""Understanding a job file: YAML, overrides, and errors that name the key and what was meant.

Unknown keys are refused with the nearest known one; paths are taken relative to the job file's
folder.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from beam_inference.config.factories import factory_parts
from beam_inference.config.fields import unknown_key_hint
from beam_inference.config.job import FurtherOutput, JobConfig
from beam_inference.config.network import Member, Network, network_keys
from beam_inference.config.normalize import Statistics, rename_levels
from beam_inference.config.operators import Operator
from beam_inference.config.volumes import Input, LevelsBox, Mask, Output, Preview
from beam_inference.config.yaml_text import parse_yaml
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import holds_credentials, shorten_text, shorten_value

_MOST_FAULTS = 50
"""Most faults of a job that a message lists."""


def parse_job_text(
    text: str, folder: str | Path, source: str, overrides: Sequence[str] = ()
) -> JobConfig:
    """Validate the text of a job file, after ``key.key=value`` overrides, whose values are YAML.

    Raises:
        ConfigError: it is no YAML, or the job is not valid; the message names every fault.
    """
    values = parse_job_values(text, source)
    try:
        for override in overrides:
            override_value(values, override)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return parse_job(values, folder, source)


def parse_job_values(text: str, source: str) -> object:
    """Read the YAML of a job file, whose keys are not looked at.

    Raises:
        ConfigError: it is none.
    """
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def parse_job(values: object, folder: str | Path, source: str = "the job") -> JobConfig:
    """Validate a job given as nested dicts; relative paths start from ``folder``, a path or a URL.

    Raises:
        ConfigError: the job is not valid.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source}: expected a mapping with the keys {', '.join(JobConfig.model_fields)}"
        )
    try:
        job = JobConfig.model_validate(values)
        # Once more: what a relative path leads to may be what cannot be written to.
        return JobConfig.model_validate(_with_absolute_paths(job, folder).model_dump())
    except UnicodeEncodeError:
        raise ConfigError(
            f"{source} holds halves of characters (surrogates): write it in UTF-8"
        ) from None
    except ValidationError as error:
        faults = [f"  {_explain(each)}" for each in error.errors()[:_MOST_FAULTS]]
        if error.error_count() > len(faults):
            faults.append(f"  … and {error.error_count() - len(faults)} more")
        raise ConfigError("\n".join([f"{source} is not a valid job:", *faults])) from None


def override_value(values: Any, override: str) -> None:
    """Put the value of ``key.key=value``, which is YAML, into the values of a job file.

    Raises:
        ConfigError: it is none, or leads to no key.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"--set takes key.key=value, such as inference.device=cpu; found "
            f"'{shorten_text(override)}'"
        )
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(values, dict) and values.get(parent) is None:
            values[parent] = {}
        values = _member(values, parent)
    if not isinstance(values, dict):
        raise ConfigError(f"--set {shorten_text(override)}: it does not lead to a key of the job")
    try:
        values[last] = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"--set {shorten_text(key)}: {error}") from None


def _member(values: Any, name: str) -> Any:
    """What a mapping has under a name, or a list at a number; None if there is no such thing."""
    if isinstance(values, list) and name.isdecimal() and int(name) < len(values):
        return values[int(name)]
    return values.get(name) if isinstance(values, dict) else None


def _key(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The job file's key of a pydantic location, without the names of branches of unions."""
    parts = list(map(str, location))
    if parts[:3] == ["model", "normalize", "steps"]:
        del parts[4:5]
        parts[4:] = [part for part in parts[4:] if part not in ("number", "list", "pair")]
    if ".".join(parts[:2]) in _BRANCHED:
        del parts[2:3]
    if parts[:1] == ["inputs"] and parts[2:3] == ["scale"]:
        del parts[3:4]
    if parts[-2:-1] in (["head"], ["key"]):  # of a head: a place or a name
        del parts[-1]
    return tuple(parts)


_BRANCHED = (
    "model.normalize",
    "inference.augment",
    "inference.batch_size",
    "inference.blend",
    "inference.chunk_shape",
    "input.box",
    "input.scale",
    "model.combine_planes",
    "roi.domain",
)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models in an annotation such as ``Roi | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models_in(each)]


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model whose key a pydantic location is; a union's branch has the name of its model."""
    models: list[type[BaseModel]] = [JobConfig]
    for part in location[:-1]:
        named = [model for model in models if model.__name__.lower() == part]
        fields = [
            model.model_fields[part]
            for model in models
            if isinstance(part, str) and part in model.model_fields
        ]
        models = (
            named or [each for field in fields for each in _models_in(field.annotation)] or models
        )
    return models[0]


def _explain(error: Any) -> str:
    key = _key(error["loc"])
    name = ".".join(key)
    if error["type"] == "extra_forbidden":
        fields = _model_at(error["loc"]).model_fields
        return f"{name}: unknown key; {unknown_key_hint(key[-1], fields)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{name}: {message}" if name else message
    if error["type"] == "missing":
        return f"{name}: missing"
    value = error["input"]
    value_text = shorten_value(value)
    if key[:1] == ("storage",) or (isinstance(value, str) and holds_credentials(value)):
        value_text = f"something of type {type(value).__name__}, which may be secret"
    return f"{name}: {message[0].lower()}{message[1:]}; found {value_text}"


def absolute_path(path: str, folder: str | Path) -> str:
    """A path, relative to a folder or bucket, as an absolute one; a URL as it is.

    ``~/`` at its beginning stands for the home folder, as no shell puts it into a file.

    Raises:
        ConfigError: it leads out of the bucket, or the home folder is not known.
    """
    if "://" in path:
        return path
    if path.startswith("~/"):
        try:
            path = str(Path(path).expanduser())
        except RuntimeError:
            raise ConfigError(f"{path}: the home folder is not known. Set HOME.") from None
    if isinstance(folder, str) and not path.startswith("/"):
        scheme, _, place = folder.partition("://")
        bucket, _, inside = place.partition("/")
        joined = posixpath.normpath(posixpath.join(inside, path))
        if joined.startswith(".."):
            raise ConfigError(
                f"the path {path} leads out of {scheme}://{bucket}, where the job file is"
            )
        return f"{scheme}://{bucket}/{joined}"
    return str((Path(folder) / path).absolute())


def _with_absolute_paths(job: JobConfig, folder: str | Path) -> JobConfig:
    def absolute(path: str, _key: str) -> str:
        return absolute_path(path, folder)

    def file_url(path: str, _key: str) -> str:
        path = absolute_path(path, folder)
        return path if "://" in path else Path(path).as_uri()  # % # ? are quoted

    return rename_paths(job, file=absolute, volume=file_url)


AnyJob = TypeVar("AnyJob", bound=JobConfig)


Rename: TypeAlias = Callable[[str, str], str]
"""Gives another path for a path and the key of the job file under which it stands."""


def _rename_levels_of_input(section: Input, rename: Rename) -> dict[str, object]:
    """Keys of ``input`` that may name levels files, with other names of these."""
    box = section.box
    if isinstance(box, LevelsBox):
        box = box.model_copy(update={"levels": rename(box.levels, "input.box.levels")})
    resample = section.resample
    if resample is not None and isinstance(resample.clip, Statistics):
        clip = resample.clip.model_copy(
            update={"levels": rename(resample.clip.levels, "input.resample.clip.levels")}
        )
        resample = resample.model_copy(update={"clip": clip})
    return {"box": box, "resample": resample}


def rename_paths(job: AnyJob, *, file: Rename, volume: Rename) -> AnyJob:
    """A job with other paths, which are not validated again.

    Args:
        job: the job.
        file: for files of the network and of operators, whose key is ``postprocess.NUMBER``.
        volume: for volumes, the state folder and levels files.
    """

    def model(path: str, key: str) -> str:
        factory = factory_parts(path)
        if path == "identity" or (factory and not factory[0].endswith(".py")):
            return path
        return f"{file(factory[0], key)}:{factory[1]}" if factory else file(path, key)

    def network_files(section: Network | Member, key: str) -> dict[str, object]:
        weights = section.weights and file(section.weights, f"{key}.weights")
        return {"path": model(section.path, f"{key}.path"), "weights": weights}

    def mask(section: Mask | None, key: str) -> Mask | None:
        return section and section.model_copy(update={"path": volume(section.path, key)})

    def operator(section: Operator, key: str) -> Operator:
        return section.with_absolute_paths(lambda path: file(path, key))

    def levels(path: str) -> str:
        return volume(path, "model.normalize")

    def preview(output: Output, key: str) -> Preview | None:
        section = output.preview
        if section is None or section.path is None:
            return section
        return section.model_copy(update={"path": volume(section.path, f"{key}.preview.path")})

    def further(section: FurtherOutput, key: str) -> FurtherOutput:
        operators = [
            operator(each, f"{key}.postprocess.{number}")
            for number, each in enumerate(section.postprocess)
        ]
        path = volume(section.path, f"{key}.path")
        changes = {"path": path, "postprocess": operators, "preview": preview(section, key)}
        return section.model_copy(update=changes)

    main, *keys = network_keys(job.model)
    state = job.job.state_path
    network = job.model.model_copy(
        update={
            **network_files(job.model, main),
            "ensemble": [
                each.model_copy(update=network_files(each, key))
                for each, key in zip(job.model.ensemble, keys, strict=True)
            ],
            "normalize": rename_levels(job.model.normalize, levels),
        }
    )
    path = job.input.path
    return job.model_copy(
        update={
            "input": job.input.model_copy(
                update={
                    "path": None if path is None else volume(path, "input.path"),
                    "mask": mask(job.input.mask, "input.mask.path"),
                    **_rename_levels_of_input(job.input, volume),
                }
            ),
            "inputs": [
                each.model_copy(update={"path": volume(each.path, f"inputs.{number}.path")})
                for number, each in enumerate(job.inputs)
            ],
            "output": job.output.model_copy(
                update={
                    "path": volume(job.output.path, "output.path"),
                    "preview": preview(job.output, "output"),
                }
            ),
            "model": network,
            "postprocess": [
                operator(each, f"postprocess.{number}")
                for number, each in enumerate(job.postprocess)
            ],
            "outputs": {
                name: further(each, f"outputs.{name}") for name, each in job.outputs.items()
            },
            "mask": mask(job.mask, "mask.path"),
            "job": job.job.model_copy(
                update={"state_path": None if state is None else volume(state, "job.state_path")}
            ),
        }
    )
