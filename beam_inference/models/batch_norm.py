"""Sets which statistics BatchNorm layers use: those of the training, or those of each batch."""

from __future__ import annotations

from typing import Any

import torch

from beam_inference.config.inference import Inference
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError


def set_batch_norm(module: torch.nn.Module, statistics: str, *, scripted: bool) -> None:
    """Have BatchNorm layers use some statistics; the rest of the network stays in evaluation mode.

    Args:
        module: the network; statistics that are stored in it are not changed.
        statistics: "running" or "batch".
        scripted: whether the network is TorchScript.

    Raises:
        ModelContractError: the network cannot use these statistics.
    """
    layers = [layer for layer in module.modules() if _is_batch_norm(layer)]
    if scripted:
        traced = _traced_batch_norm(module)
        fixed = " and ".join(sorted(traced))
        if traced and traced != {statistics}:
            raise ModelContractError(
                f"the TorchScript file was traced with BatchNorm using {fixed} statistics, which "
                f"cannot be changed; the job says model.batch_norm: {statistics}. Write "
                f"batch_norm: {fixed}, or use a scripted file or a factory."
            )
    if statistics == "running":
        if any(getattr(layer, "running_mean", None) is None for layer in layers):
            raise ModelContractError(
                "the network has BatchNorm layers without stored statistics, which use those of "
                "the batch, whatever is in it; the job says model.batch_norm: running. Write "
                "batch_norm: batch."
            )
        return
    if not layers:
        raise ModelContractError(
            "the job says model.batch_norm: batch, but the network has no BatchNorm layer whose "
            "statistics could be chosen. Remove batch_norm; if the network calls batch_norm "
            "itself, its factory must choose."
        )
    for layer in layers:
        if scripted:
            layer.train()
        else:
            setattr(layer, "track_running_stats", False)  # noqa: B010  # typed as a tensor by torch's stubs
            layer.running_mean = layer.running_var = None  # type: ignore[assignment]


def _is_batch_norm(layer: Any) -> bool:
    return isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) or "BatchNorm" in getattr(
        layer, "original_name", ""
    )


def _traced_batch_norm(module: Any) -> set[str]:
    """The statistics, "running" or "batch", that a TorchScript file fixes for BatchNorm layers."""
    fixed = set()
    graph = module.inlined_graph  # must outlive its nodes
    for node in graph.findAllNodes("aten::batch_norm", recurse=True):
        training = list(node.inputs())[5]
        if training.node().kind() == "prim::Constant":
            fixed.add("batch" if training.toIValue() else "running")
    return fixed


def check_exported(program: Any, model: Network, inference: Inference) -> None:
    """Refuse a job that contradicts a torch.export file: in its batch size, or in BatchNorm.

    Raises:
        ModelContractError: it does.
    """
    inputs = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    batch = inputs[0][0] if inputs else None
    if isinstance(batch, int) and batch != inference.patches_per_call:
        raise ModelContractError(
            f"the torch.export file {model.path} takes batches of exactly {batch}; the job says "
            f"inference.batch_size: {inference.batch_size}. Write batch_size: {batch}, or export "
            "it with a dynamic batch dimension."
        )
    modes = {exported_batch_norm(node) for node in program.graph.nodes} - {None}
    if modes != {model.batch_norm} and (modes or model.batch_norm == "batch"):
        raise ModelContractError(
            f"the torch.export file {model.path} has BatchNorm using "
            f"{' and '.join(sorted(map(str, modes))) or 'no'} statistics, which cannot be "
            f"changed; the job says model.batch_norm: {model.batch_norm}."
        )


def exported_batch_norm(node: Any) -> str | None:
    """The statistics that a node of a torch.export file uses; None where it is no BatchNorm."""
    name = str(node.target) if node.op == "call_function" else ""
    if "batch_norm" not in name or "instance" in name:
        return None
    if "no_training" in name:
        return "running"
    return "batch" if any(argument is True for argument in node.args[5:6]) else "running"
