"""Tensors as files of strangers may hold them: dense ones of plain numbers, and nothing else."""

from __future__ import annotations

import torch

_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tensor_fault(value: object) -> str | None:
    """Describe why a value must not come from a file that is not trusted.

    Indices of sparse tensors, and offsets of nested ones, come from the file, and PyTorch's
    operators believe them: they would read and write beyond the tensor.

    Returns:
        What it is, such as "a sparse tensor"; None for a dense tensor of plain numbers.
    """
    if type(value) not in _CLASSES or not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if value.__dict__:  # which would stand before PyTorch's own attributes of these names
        return "a tensor with attributes of its own"
    if value.is_meta:
        return "a tensor without values"
    if value.is_nested:
        return "a nested tensor"
    if value.layout is not torch.strided:
        return "a sparse tensor"
    return "a quantised tensor" if value.is_quantized else None
