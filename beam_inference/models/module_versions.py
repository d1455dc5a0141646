"""Versions of a network's modules, which PyTorch's state dicts hold beside the tensors.

A module that was changed may convert the weights of its earlier versions as it loads them, and
takes those without a version for old ones. PyTorch keeps versions in the attribute ``_metadata`` of
a state dict; safetensors have no place for it, and loading these by other tools gives no versions.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from beam_inference.config.fields import Json

Versions = dict[str, dict[str, int | dict[str, int]]]
"""By the name of a module ("" is the network): its version, or those of what was added to it."""

_VERSIONS: TypeAdapter[Versions] = TypeAdapter(Versions)

_METADATA = "_metadata"

KEY = "module_versions"
"""Key of safetensors' metadata under which a training of ours writes them."""


def versions_of(state: Mapping[str, object]) -> Versions:
    """The versions in a state dict, and nothing else that its file may have put there."""
    stated = getattr(state, _METADATA, None)
    if not isinstance(stated, Mapping):
        return {}
    return {
        name: {key: value for key, value in entry.items() if _is_version(key, value)}
        for name, entry in stated.items()
        if isinstance(name, str) and isinstance(entry, Mapping)
    }


def _is_version(key: object, value: object) -> bool:
    if isinstance(value, Mapping):  # as spectral_norm writes
        return isinstance(key, str) and all(map(_is_version, value.keys(), value.values()))
    return isinstance(key, str) and type(value) is int and "version" in key


def with_versions(tensors: Mapping[str, object], versions: Versions) -> Json:
    """A state dict of tensors, with versions where PyTorch looks for them."""
    state = OrderedDict(tensors)
    setattr(state, _METADATA, versions)
    return state


def copy_state(state: Mapping[str, object]) -> Json:
    """A copy of a state dict, of its tensors and versions and nothing else; tensors are shared."""
    return with_versions(state, versions_of(state))


def without_prefix(state: Json, prefix: str) -> Json:
    """A state dict whose names lack a prefix, such as "module.", with its versions."""
    holder = prefix.removesuffix(".")
    versions = {
        "" if name == holder else name.removeprefix(prefix): entry
        for name, entry in versions_of(state).items()
        if name == holder or name.startswith(prefix)
    }
    return with_versions({key.removeprefix(prefix): each for key, each in state.items()}, versions)


def write_versions(state: Mapping[str, object]) -> str:
    """The versions in a state dict, as metadata of safetensors."""
    return json.dumps(versions_of(state))


def read_versions(text: str) -> Versions:
    """Read what :func:`write_versions` wrote; of a text of others there are none."""
    try:
        return _VERSIONS.validate_json(text, strict=True)
    except ValidationError:
        return {}
