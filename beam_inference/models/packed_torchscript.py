"""TorchScript in packages of strangers: its programs must do nothing but compute.

What a file holds is judged before PyTorch loads it, as far as that runs anything by itself; the
rest of its programs afterwards, before they are called.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from beam_inference.errors import ModelContractError
from beam_inference.models.archive import open_archive
from beam_inference.models.own_copy import own_copy
from beam_inference.models.pickle_bounds import PickleOutOfBounds, check_pickle
from beam_inference.models.pickled_storages import check_storages
from beam_inference.models.script_state import list_changed
from beam_inference.models.stand_ins import check_saved_by_torch
from beam_inference.models.torchscript import is_torchscript, load_file, not_loaded

if TYPE_CHECKING:
    import torch

_RUN_AT_ONCE = re.compile(rb"\b__setstate__\b")
"""A method that runs as soon as a file is loaded."""

_PICKLE = "pkl"
"""How names of pickles end: those of data, and those that say where in its source a program is."""

_NOT_READ = "/traced_inputs.pkl"
"""A pickle of tensors whose values PyTorch leaves out; it reads them only if it is asked to."""

_DATA = re.compile(
    # what data may be made of: tensors, containers, and objects of classes in the file itself
    r"__torch__(?!\.torch\.classes\b)[\w.]* \w+|collections OrderedDict|torch \w+Storage"
    r"|torch\._utils _rebuild_(tensor_v2|parameter)|torch device|torch\.jit\._pickle \w+"
)

_OWN_PRIVATE = re.compile(
    # of TorchScript: parts of Python, and what its library of layers calls
    r"__\w+|_(get_tracing_state|infer_size|list_to_tensor|set_item|size_if_not_equal"
    r"|tensor_to_list|unwrap_optional)|_no_grad_\w+"
)
_MORE_THAN_COMPUTING = frozenset(
    {"_print", "chr", "initial_seed", "manual_seed", "seed", "set_data"}
)
_OF_PROGRAMS = frozenset({"set_grad_enabled", "storage_offset", "warn"})
"""Operators of TorchScript that are harmless, though programs of torch.export have none."""

_BELIEVING = re.compile(
    # their arguments are checked by what calls them: see exported_calls
    r"_batch_norm_(no|with)_update\w*|_native_batch_norm_legit\w*|_weight_norm\w*"
    r"|_scaled_dot_product_flash_attention_for_cpu"
)
_PARTS_OF_LANGUAGE = re.compile(
    r"prim::(Call\w+|Constant|ConstantChunk|CreateObject|DictConstruct|Enum\w+|GetAttr|If|IfThenElse"
    r"|ListConstruct|ListUnpack|Loop|ModuleContainerIndex|NumToTensor|RaiseException|SetAttr"
    r"|StringIndex|Tuple\w+|Uninitialized|abs|device|dtype|fork|data|index|is_\w+|isinstance"
    r"|itemsize|layout|max|min|name|nbytes|rangelist|requires_grad|tolist|type|unchecked_cast"
    r"|unchecked_unwrap_optional)|aten::\w+"
)
_OF_BATCH_NORM = frozenset({"num_batches_tracked", "running_mean", "running_var"})
"""Attributes that layers change in training alone."""

_DEEPEST = 200
_LONGEST_CHAIN = 5000
_TOKENS = re.compile(
    rb"#[^\n]*|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"|[(\[{]|[)\]}]|,|\n[ \t]*"
    rb"|\b(?:not|and|or|if|else|elif|in|is)\b|[-+*/%@<>=!&|^~.]+"
)


def load_packed(path: Path, *, allow_pickle: bool) -> torch.nn.Module:
    """Load a network of a package, whose programs must do nothing but compute.

    Args:
        path: of the file.
        allow_pickle: whether it is trusted: then it may be anything that
            :func:`beam_inference.models.torchscript.load_file` takes.

    Raises:
        ModelContractError: it is no TorchScript, or its programs could do more.
    """
    check_saved_by_torch(path)
    if allow_pickle:
        return load_file(path, allow_pickle=True)
    with own_copy(path) as copy:
        reason = _find_more_than_computing(copy) if is_torchscript(copy) else None
        if reason is not None:
            raise ModelContractError(
                f"the TorchScript file {path} {reason}, and what packages bring may only compute. "
                "If you trust it, pass --trust_model."
            )
        return load_file(copy, allow_pickle=False)


def _find_more_than_computing(path: Path) -> str | None:
    """What the programs of a file would do beside computing, in a clause; None if nothing."""
    import torch

    with open_archive(path, "TorchScript file") as archive:
        reason = _judge_members(archive)
    if reason is not None:
        return reason
    unit = torch._C.CompilationUnit()
    try:
        torch._C.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)  # type: ignore[call-arg]
    except Exception as error:
        raise not_loaded(path, error) from None
    for function in unit.get_functions():  # type: ignore[func-returns-value, attr-defined]
        for node in _list_nodes(function.graph):
            reason = _judge_node(node, function.name)
            if reason is not None:
                return f"{reason} in {function.name}"
        changed = list_changed(function.graph) - _OF_BATCH_NORM
        if changed and function.name != "__init__":
            return f"keeps {min(changed)!a:.60} from one batch to the next in {function.name}"
    return None


def _judge_members(archive: zipfile.ZipFile) -> str | None:
    """What PyTorch would do as it loads the members of a file, in a clause; None if nothing.

    PyTorch finds members whatever the case of their names.
    """
    members = {each.filename.lower(): each.file_size for each in archive.infolist()}
    for name in archive.namelist():
        if name.lower().endswith(".py"):
            source = archive.read(name)
            if _RUN_AT_ONCE.search(source):
                return "runs code of its own as it is loaded (__setstate__)"
            if _is_deep(source):
                return f"has expressions inside expressions on more than {_DEEPEST} levels"
        elif name.lower().endswith(("." + _PICKLE, "_" + _PICKLE)):
            reason = _judge_pickle(name, archive.read(name), members)
            if reason is not None:
                return reason
    return None


def _judge_pickle(name: str, content: bytes, members: Mapping[str, int]) -> str | None:
    """What a pickle would make PyTorch do as it is loaded, in a clause; None if nothing.

    Args:
        name: of the archive's member.
        content: the pickle.
        members: bytes of each member of the archive, by its name in small letters.
    """
    try:
        foreign = [each for each in check_pickle(content).names if not _DATA.fullmatch(each)]
        if foreign:
            return f"makes objects that are neither tensors nor its own: {foreign[0]!a:.80}"
        if not name.endswith(_NOT_READ):
            folder = name.lower().removesuffix("." + _PICKLE)
            check_storages(content, members, folder + "/")
    except PickleOutOfBounds as error:
        return f"has the member {name}, of which {error}"
    return None


def _is_deep(source: bytes) -> bool:
    """Whether expressions or blocks lie inside each other on so many levels that parsers end."""
    links = [0]
    branches = 0
    for match in _TOKENS.finditer(source):
        token = match[0]
        if token[:1] in b"#'\"":
            continue
        if token[:1] == b"\n":
            if len(token) > 1 + 2 * _DEEPEST:
                return True
            links[0] = 0 if len(links) == 1 else links[0]
        elif token in (b"(", b"[", b"{"):
            links[-1] += 1
            links.append(0)
        elif token in (b")", b"]", b"}"):
            if len(links) > 1:
                links.pop()
        elif token == b",":
            links[-1] = 0
        else:
            links[-1] += len(token)
            branches += token == b"elif"
        if len(links) > _DEEPEST or links[-1] > _LONGEST_CHAIN or branches > _LONGEST_CHAIN:
            return True
    return False


def _judge_node(node: torch._C.Node, function: str) -> str | None:
    """What a step of a program would do beside computing, in a clause; None if nothing."""
    kind = node.kind()
    if not _PARTS_OF_LANGUAGE.fullmatch(kind) or not _computes(node):
        return f"calls {kind}"
    if any("torch.classes" in str(value.type()) for value in node.outputs()):
        return "makes an object of PyTorch's own"
    if kind == "prim::SetAttr" and function != "__init__":
        name = node.s("name")
        if name not in _OF_BATCH_NORM:
            return f"keeps {name!a:.60} from one batch to the next"
    return None


def _computes(node: torch._C.Node) -> bool:
    """Whether an operator computes tensors or numbers, and stays within the memory of these."""
    from beam_inference.models.exported_calls import UNFILLED
    from beam_inference.models.exported_program import is_arithmetic

    library, _, name = node.kind().partition("::")
    if library != "aten" or name in _OF_PROGRAMS or _OWN_PRIVATE.fullmatch(name):
        return True
    if name == "values":  # of a dictionary, or of a sparse tensor
        return all(value.type().kind() != "TensorType" for value in node.inputs())
    is_other = name in _MORE_THAN_COMPUTING or name in UNFILLED or _BELIEVING.fullmatch(name)
    return not is_other and is_arithmetic(name)


def _list_nodes(block: torch._C.Graph | torch._C.Block) -> Iterator[torch._C.Node]:
    for node in block.nodes():
        yield node
        if node.hasAttribute("Subgraph"):
            yield from _list_nodes(node.g("Subgraph"))
        for inner in node.blocks():
            yield from _list_nodes(inner)
