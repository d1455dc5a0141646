"""OpenVINO's files, read as far as it takes to know that they are what their name says.

OpenVINO goes by what is in a file: it would run an ONNX file with the suffix .xml, too, and that
may keep its weights in files that are not part of the job's identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO
from xml.parsers import expat

from beam_inference.errors import ModelContractError
from beam_inference.models.stand_ins import check_no_stand_in

_DEEPEST = 45
"""Networks in branches of networks, 13 deep: OpenVINO takes twice as long for each more."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


_RANDOM = frozenset(("Multinomial", "RandomUniform"))


class _Malformed(Exception):
    """The file is no network of OpenVINO; the message says why."""


class _Random(Exception):
    """A layer draws random numbers; the message names its type."""


def check_network(path: Path) -> None:
    """Check that a file is XML that describes a network of OpenVINO's without random numbers.

    Raises:
        ModelContractError: it is not.
    """
    check_no_stand_in(path)
    with path.open("rb") as file:
        check_structure(file, str(path))


def check_structure(file: BinaryIO, name: str) -> None:
    """Check an open file as :func:`check_network` does; ``name`` is what messages call it.

    Raises:
        ModelContractError: it is not XML that describes such a network.
    """
    try:
        _check(file)
    except _Random as error:
        raise ModelContractError(
            f"{name} draws random numbers (by {error}), so its output would be another one each "
            "time. Convert the network in evaluation mode, and without random numbers."
        ) from None
    except (_Malformed, expat.ExpatError) as error:
        raise ModelContractError(
            f"{name} is not a network as OpenVINO saves it (.xml), or damaged: {error}. Save or "
            "copy it again; a network of another kind needs the suffix of its kind."
        ) from None


def _check(file: BinaryIO) -> None:
    depth = 0

    def start(name: str, attributes: Mapping[str, str]) -> None:
        nonlocal depth
        if depth == 0 and name != "net":
            raise _Malformed(f"it holds <{name[:40]}>, not <net>")
        depth += 1
        if name == "layer" and attributes.get("type") in _RANDOM:
            raise _Random(attributes["type"])
        if depth > _DEEPEST:
            raise _Malformed(
                f"its elements are nested {_DEEPEST} deep and more, with which OpenVINO ends after "
                "hours, if ever"
            )

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1

    def refuse_declaration(*_: object) -> None:
        raise _Malformed("it declares entities, which a network does not need")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse_declaration
    # so that it is nothing else besides: no other kind of network begins in this way
    if not file.read(4).removeprefix(_BYTE_ORDER_MARK).startswith(b"<"):
        raise _Malformed("it is not XML")
    file.seek(0)
    parser.ParseFile(file)
