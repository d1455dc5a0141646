"""The metadata of the Dataflow Flex Template: a form, generated from the parser of ``run``'s flags.

The launcher runs ``templates/main.py`` with the parameters of the form. It also passes the
environment of the launch as Beam's flags, so these are not parameters: ``--runner``, ``--project``,
``--region``, ``--job_name`` and ``--template_location``, which must not be changed;
``--staging_location`` and ``--temp_location``; and, if requested, ``--machine_type``,
``--service_account_email``, ``--network``, ``--subnetwork`` and so on.

    python -m beam_inference.cli.flex_template > templates/flex/metadata.json
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import NamedTuple

from beam_inference.beam.dataflow_gpus import DRIVERS, GPUS
from beam_inference.config.fields import Json


class _Field(NamedTuple):
    """What the form needs beyond the parser: a label, a type, and a pattern of accepted values."""

    label: str
    type: str
    pattern: str | None = None  # POSIX extended, as the service reads it: no \d, no lookahead


_SOURCE = "^(gs|s3|https?)://.+$"
_CORNER = "-?[0-9]+x-?[0-9]+x-?[0-9]+"
_FIELDS = {
    "job": _Field("Job file", "GCS_READ_FILE"),
    "input": _Field("Input volume", "TEXT", _SOURCE),
    "output": _Field("Output volume", "TEXT", "^(gs|s3)://.+$"),
    "model": _Field("Network", "TEXT"),
    "weights": _Field("Weights", "TEXT", _SOURCE),
    "roi": _Field("Region of interest", "TEXT", f"^{_CORNER}:{_CORNER}$"),
    "volume": _Field("Volume", "TEXT"),
    "step": _Field("Step", "TEXT"),
    "resume": _Field("Resume", "BOOLEAN"),
    "max_failed_chunks": _Field("Bound of quarantined chunks", "NUMBER", "^[0-9]+$"),
    "chunks": _Field("Chunks", "TEXT"),
    "redo": _Field("Do these chunks again", "BOOLEAN"),
    "sample": _Field("Share of the chunks", "NUMBER", "^(0?\\.[0-9]+|1(\\.0*)?|[0-9.]+e-[0-9]+)$"),
    "seed": _Field("Seed of the sample", "NUMBER", "^[0-9]+$"),
    "overwrite": _Field("Overwrite", "BOOLEAN"),
    "allow_pickle": _Field("Allow pickle", "BOOLEAN"),
    "trust_model": _Field("Trust the model", "BOOLEAN"),
    "log_format": _Field("Log format", "ENUM"),
    "gpu": _Field("GPU", "ENUM"),
    "gpu_count": _Field("GPUs per worker", "NUMBER", "^[1-9][0-9]*$"),
    "gpu_driver": _Field("GPU driver", "TEXT", f"^({DRIVERS})$"),
    "gpu_sharing": _Field("GPU sharing", "ENUM"),
}
_ONLY_WITH_GPU = ("gpu_count", "gpu_driver", "gpu_sharing")
# --set is left out: it is repeatable, and gcloud would split its values at commas
_NOT_IN_A_FORM = ("help", "debug", "set")

_IMAGE = {
    "name": "sdk_container_image",
    "label": "Image of the workers",
    # Required: without it the workers would run Beam's own image, which lacks this package.
    "helpText": (
        "The image of this template, with its tag: the workers run in the same one as the launcher."
    ),
    "paramType": "TEXT",
    "regexes": ["^[^/ ]+/[^ ]+(:[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{64})$"],
}


def metadata(parser: argparse.ArgumentParser) -> Json:
    """The metadata of a Flex Template whose parameters are the flags of ``parser``.

    Raises:
        LookupError: a flag has no label and type in this module, or no help.
    """
    groups = {
        id(action): group.title
        for group in parser._action_groups
        for action in group._group_actions
    }
    parameters = [
        _parameter(parser, action, groups[id(action)])
        for action in parser._actions
        if action.dest not in _NOT_IN_A_FORM
    ]
    required = [parameter for parameter in parameters if "isOptional" not in parameter]
    optional = [parameter for parameter in parameters if "isOptional" in parameter]
    return {
        "name": "beam-inference",
        "description": (
            "Run a trained 3-D ConvNet over a volume of any size, or what an earlier launch left "
            "of it."
        ),
        "parameters": [*required, _IMAGE, *optional],
    }


def _parameter(parser: argparse.ArgumentParser, action: argparse.Action, group: str | None) -> Json:
    field = _FIELDS.get(action.dest)
    if field is None or not action.help:
        raise LookupError(
            f"--{action.dest}: describe it in beam_inference/cli/flex_template.py, and in its help"
        )
    help = parser._get_formatter()._expand_help(action)
    parameter: Json = {
        "name": action.dest,
        "label": field.label,
        "helpText": f"{help[0].upper()}{help[1:].rstrip('.')}.",
        "paramType": field.type,
    }
    if not action.required:
        parameter["isOptional"] = True
    if field.pattern is not None:
        parameter["regexes"] = [field.pattern]
    if field.type == "ENUM":
        parameter["enumOptions"] = [
            {"value": value, "label": value} for value in action.choices or ()
        ]
    if action.default not in (None, []):
        parameter["defaultValue"] = (
            str(action.default).lower() if field.type == "BOOLEAN" else str(action.default)
        )
    if group not in (None, "positional arguments", "options"):
        parameter["groupName"] = f"{group[0].upper()}{group[1:]}"
    if action.dest in _ONLY_WITH_GPU:
        parameter |= {"parentName": "gpu", "parentTriggerValues": list(GPUS)}
    return parameter


def main() -> int:
    """Print the metadata of the template that runs ``templates/main.py``."""
    from beam_inference.cli.run import flags_parser

    print(json.dumps(metadata(flags_parser()), indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
