"""Pickles that :func:`torch.save` has written, and what :func:`torch.load` would make of them.

PyTorch's own reader of files that are not trusted calls more than what puts stored bytes into
tensors. Tensors that are made by their sizes hold what lay in the process's memory, so that every
worker would compute with other weights; others take memory without end.
"""

from __future__ import annotations

import zipfile
from typing import IO

from beam_inference.models.pickle_bounds import (
    LATIN1,
    METADATA,
    Call,
    Followed,
    NotFollowed,
    PickleOutOfBounds,
    Value,
    check_keys,
    check_pickle,
)
from beam_inference.models.pickled_storages import check_tensors_fit, read_names

_MAKE_TENSORS = frozenset(
    f"torch._utils _rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "parameter")
)
_MAKE_VALUES = frozenset(
    {
        "numpy dtype",
        "numpy.core.multiarray scalar",
        "numpy._core.multiarray scalar",
        "torch Size",
        "torch device",
        "torch.serialization _get_layout",
    }
)
_MAKE_CONTAINERS = frozenset(
    {"collections Counter", "collections OrderedDict", "__builtin__ set", "builtins set"}
)
_OF_PAIRS = "collections OrderedDict"
_MAKE_BYTES = "_codecs encode"
_OTHER_TENSORS = {
    **dict.fromkeys(("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor"), "a sparse tensor"),
    **dict.fromkeys(("_rebuild_qtensor", "_rebuild_quantized_tensor"), "a quantised tensor"),
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor without values",
    "_rebuild_parameter_with_state": "a tensor with attributes of its own",
    "_rebuild_from_type_v2": "a tensor with attributes of its own, or of a class of its own",
}
"""What functions of PyTorch's make that :func:`.tensors.tensor_fault` would refuse."""


def check_saved(file: IO[bytes]) -> None:
    """Follow the pickles that :func:`torch.load` would read.

    Args:
        file: what :func:`torch.save` has written: an archive, which was checked as a whole, or
            PyTorch's former form, which begins with pickles.

    Raises:
        PickleOutOfBounds: one is out of bounds, no pickle (NotFollowed), or describes other than
            plain values and tensors whose bytes are in the file.
    """
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        _check_former_form(file)
        return
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.lower().endswith(".pkl"):  # PyTorch finds it whatever the case of its name
                _judge(check_pickle(archive.read(name)))


def _check_former_form(file: IO[bytes]) -> None:
    """Check the five pickles before the tensors' bytes. Raises PickleOutOfBounds.

    The fourth is what was saved, and the fifth lists the storages whose bytes follow.
    """
    pickles = []
    for _ in range(5):
        start = file.tell()
        _judge(check_pickle(file))
        length = file.tell() - start
        file.seek(start)
        pickles.append(file.read(length))
    check_tensors_fit(pickles[3], read_names(pickles[4]))


def _judge(followed: Followed) -> None:
    """Check what a pickle does beside holding values. Raises PickleOutOfBounds."""
    for call in followed.calls:
        _judge_call(call)
    for name, attributes in followed.filled:
        is_state_dict = name == "collections OrderedDict()" and all(
            key is METADATA for key in attributes.parts[::2]
        )
        if not is_state_dict and name != "numpy dtype()":
            raise NotFollowed(f"it changes what {name or 'a value'} has made")


def _judge_call(call: Call) -> None:
    if call.name in _MAKE_TENSORS or call.name in _MAKE_VALUES:
        return
    if call.name in _MAKE_CONTAINERS:
        is_of_pairs = call.name == _OF_PAIRS
        for items in call.arguments.parts:
            check_keys(_key_of(each) if is_of_pairs else each for each in items.parts)
    elif call.name == _MAKE_BYTES:
        if len(call.arguments.parts) != 2 or call.arguments.parts[1] is not LATIN1:
            raise NotFollowed(f"it calls {_MAKE_BYTES} otherwise than for bytes")
    else:
        other = _OTHER_TENSORS.get(call.name.rpartition(" ")[2])
        if other is not None:
            raise PickleOutOfBounds(
                f"it holds {other}: expected dense tensors of plain numbers, of a network that is "
                "neither sparse nor quantised"
            )
        raise NotFollowed(f"it calls {call.name or 'a value'}")


def _key_of(item: Value) -> Value:
    """The key of a pair, of which Python 2 makes its ordered mappings."""
    return item.parts[0] if len(item.parts) == 2 else item
