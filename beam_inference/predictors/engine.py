"""What of an engine determines the bits it computes: part of a job's fingerprint."""

from __future__ import annotations

import hashlib

import torch


def torch_engine(version: str, device: str, precision: str, threads: int, parameters: str | None) -> dict[str, str]:
    """PyTorch's: ``threads`` where the arithmetic is done by them, ``parameters`` where no weights file states them."""
    engine = {"engine": "torch", "engine_version": version, "device": device, "precision": precision}
    if device == "cpu":
        engine["threads"] = str(threads)
    if parameters is not None:
        engine["parameters"] = parameters
    return engine


def parameters_sha256(module: torch.nn.Module) -> str:
    """Hash of a module's parameters and buffers: names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
