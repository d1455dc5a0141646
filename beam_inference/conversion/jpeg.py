"""Tells JPEGs that are not whole, of which other decoders take the rest for grey."""

from __future__ import annotations

import re

import tensorstore as ts

_CORRUPT = re.compile(r"(Corrupt JPEG data|Premature end)[^\[]*\b")
"""What libjpeg warns of."""


def check_jpeg(content: bytes) -> None:
    """Refuse a JPEG of which its decoder says that it is corrupt.

    TensorStore's decoder passes on what libjpeg warns of; those of Pillow and imagecodecs do not.

    Args:
        content: the picture, with the tables that it is decoded by.

    Raises:
        ValueError: it is corrupt.
    """
    context = ts.Context()
    memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
    memory["picture"] = content
    spec = {"driver": "jpeg", "kvstore": {"driver": "memory", "path": "picture"}}
    try:
        ts.open(spec, context=context, open=True).result()
    except ValueError as error:  # also of kinds of JPEG that it does not know
        found = _CORRUPT.search(str(error))
        if found is not None:
            raise ValueError(f"it is damaged: {found[0]}. Copy or save it again") from None
