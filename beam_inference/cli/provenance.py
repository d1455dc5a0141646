"""The commands on what an output tells of itself: ``show`` and ``reproduce``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from beam_inference.cli.argument_types import seed, share
from beam_inference.cli.command import Options, Subparsers, add_command, add_logging, set_action
from beam_inference.cli.job_options import TrustOptions, add_trust
from beam_inference.cli.terminal import table_console
from beam_inference.config.fields import Json
from beam_inference.errors import COMPLETE, FAILED, ConfigError, StateError
from beam_inference.foreign_text import clean_line, clean_text, shorten_text

if TYPE_CHECKING:
    from beam_inference.launch.reproduction import Reproduction

_LONGEST_VALUE = 160
"""Characters of a value that ``show`` prints."""


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_show(subparsers)
    _add_reproduce(subparsers)


@dataclass(frozen=True)
class ShowOptions(Options):
    """Options of ``show``."""

    volume: str
    json: bool


def _add_show(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "show",
        "show how a volume was made, by its own metadata",
        "affinities",
        "gs://bucket/affinities --json",
        description=(
            "Show what the metadata of a volume tell of its making: network and hashes, versions, "
            "normalisation, augmentation, blending, input. No file but these metadata is read."
        ),
    )
    parser.add_argument("volume", metavar="OUTPUT", help="a path or URL")
    parser.add_argument("--json", action="store_true", help="print the records as they stand")
    add_logging(parser)
    set_action(parser, ShowOptions, show)


def show(options: ShowOptions) -> int:
    """Print what the metadata of a volume tell of its making."""
    from beam_inference.job.provenance import no_record
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of
    from beam_inference.volumes.provenance import read_provenance

    url = url_of(options.volume)
    entries = read_provenance(url, storage_of_environment(LOCAL))
    if not entries:
        raise StateError(no_record(url))
    if options.json:
        print(json.dumps(entries, indent=2))
        return COMPLETE
    for entry in entries:
        _print_entry(entry)
    return COMPLETE


def _print_entry(entry: Json) -> None:
    """Print one record; it may be of another version, or of somebody else's making."""
    from rich.table import Table
    from rich.text import Text

    words = [entry.get(key) for key in ("made_by", "version")]
    print(clean_text(" ".join(str(word) for word in words if word is not None)))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {key: value for key, value in entry.items() if key not in _PRINTED_APART}
    for key, value in [*rows.items(), *_needs(entry), *_job_rows(entry)]:
        for name, leaf in _leaves(key, value):
            table.add_row(Text(shorten_text(name)), Text(_value_text(leaf)))
    table_console(100).print(table)
    print()


_PRINTED_APART = ("record", "made_by", "version", "needs", "job")


def _needs(entry: Json) -> Iterator[tuple[str, object]]:
    needs = entry.get("needs")
    for needed in needs if isinstance(needs, list) else []:
        if isinstance(needed, dict):
            words = [needed.get("name"), needed.get("sha256") and f"sha256 {needed['sha256']}"]
            yield f"needs {needed.get('key')}", ", ".join(str(word) for word in words if word)


def _job_rows(entry: Json) -> Iterator[tuple[str, object]]:
    """The rows of a job: its job file first, without the name of that section."""
    job = entry.get("job")
    if not isinstance(job, dict):
        return
    config = job.get("config")
    if isinstance(config, dict):
        yield from config.items()
    yield from ((key, value) for key, value in job.items() if key != "config")


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Values by dotted keys; those that say nothing are left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif value is not None and value != []:
        yield key, value


def _value_text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = clean_text(text)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


@dataclass(frozen=True)
class ReproduceOptions(TrustOptions):
    """Options of ``reproduce``."""

    volume: str
    sample: float
    seed: int | None
    input: str | None
    model: str | None
    weights: str | None
    file: Sequence[str]
    trust_code: bool
    json: bool


def _add_reproduce(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "reproduce",
        "compute some chunks of an output again, by its own metadata alone",
        "affinities --sample 0.01",
        "gs://bucket/affinities --model affinity.onnx",
        description=(
            "Compute a random share of an output's chunks again and compare every bit, as verify "
            "--recompute does; job file and state folder are not needed. Exit code 0 only if no "
            "chunk differs."
        ),
    )
    parser.add_argument("volume", metavar="OUTPUT", help="a path or URL")
    parser.add_argument(
        "--sample",
        type=share,
        default=0.01,
        metavar="SHARE",
        help="share of the chunks, drawn at random; one chunk at least (default: 0.01)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        metavar="N",
        help="seed of the draw, as printed before (default: a new one)",
    )
    group = parser.add_argument_group("where something lies that was moved")
    for name in ("input", "model", "weights"):
        group.add_argument(f"--{name}", metavar="PATH", help=f"{_KEYS[name]}, a path or URL")
    group.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="KEY=PATH",
        help="any other, by its key, such as mask.path or postprocess.0; repeatable",
    )
    parser.add_argument(
        "--trust_code",
        "--trust-code",
        action="store_true",
        help="run what the record names: factories, functions of one's own, TorchScript",
    )
    add_trust(parser, ", as for run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_logging(parser)
    set_action(parser, ReproduceOptions, reproduce)


_KEYS = {"input": "input.path", "model": "model.path", "weights": "model.weights"}
"""Keys of the job file by the flags that name their files."""


def reproduce(options: ReproduceOptions) -> int:
    """Compute some chunks of an output again, and print how they compare."""
    from rich.console import Console

    from beam_inference.launch import reproduction
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment

    consent = reproduction.Consent(options.trust_code, options.trust)
    with Console(stderr=True).status("reproducing") as line:
        results = reproduction.reproduce(
            options.volume,
            options.sample,
            seed=options.seed,
            files=_named_files(options),
            consent=consent,
            storage=storage_of_environment(LOCAL),
            progress=lambda done: line.update(f"reproducing: {done:,} chunks computed"),
        )
    # the exit code says what was found, even if nobody reads the report any more
    with suppress(BrokenPipeError):
        if options.json:
            print(json.dumps(list(map(_values, results)), indent=2))
        else:
            for result in results:
                _print_result(result)
        sys.stdout.flush()
    is_different = any(result.recomputation.different for result in results)
    return FAILED if is_different else COMPLETE


def _named_files(options: ReproduceOptions) -> dict[str, str]:
    """Paths by keys of the job file, as the user has named them."""
    values = {"input": options.input, "model": options.model, "weights": options.weights}
    files = {_KEYS[name]: path for name, path in values.items() if path is not None}
    for word in options.file:
        key, separator, path = word.partition("=")
        if not (key and separator and path):
            raise ConfigError(
                f"--file takes KEY=PATH, such as mask.path=tissue; found '{shorten_text(word)}'"
            )
        files[key] = path
    return files


def _values(result: Reproduction) -> Json:
    return {
        "fingerprint": result.record.fingerprint,
        "box": asdict(result.record.box),
        "bounds": asdict(result.bounds),
        "cautions": result.cautions,
        **asdict(result.recomputation),
    }


def _print_result(result: Reproduction) -> None:
    from beam_inference.cli.status_text import print_some

    record = result.record
    found = result.recomputation
    made = clean_line(f"{record.made_by} {record.version}, fingerprint {record.fingerprint}")
    print(f"{made}, by the record")
    if record.box != result.bounds:
        print(f"caution: the record is of {record.box} alone, and the volume is {result.bounds}")
    for caution in result.cautions:
        print(f"caution: {caution}")
    print(
        f"{len(found.chunks)} chunks computed again (--sample {found.share:g} --seed "
        f"{found.seed}), {len(found.different)} of them with other bits than the output"
    )
    print_some("different", found.different)
    print_some("undecided, as it was computed by other versions", found.undecided)
