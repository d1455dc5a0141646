"""Folds BatchNorm with stored statistics into the convolution before it, for PyTorch's eager mode.

Other engines do so themselves. Of y = (w * x + b) the layer makes γ (y - μ) / √(σ² + ε) + β, which
is a convolution, too: with the weights γ w / √(σ² + ε) (Jacob et al. 2018, "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", eq. 14). In a folded
network an activation that alone reads an array overwrites it.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from beam_inference.config.fields import Json
from beam_inference.engines.onednn import run_by_onednn
from beam_inference.engines.trial import TOLERANCES

logger = logging.getLogger(__name__)

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Mish, nn.Hardswish)


def fold_batch_norm(network: nn.Module, shape: tuple[int, ...], device: torch.device) -> nn.Module:
    """Fold a network's BatchNorms, as far as that can be done.

    torch.fx traces the network's code, and fails where that depends on its input. What it does not
    notice, such as a layer that other code calls, too, shows as another answer to a batch of noise.

    Args:
        network: in evaluation mode; it is not changed.
        shape: of the batch that is tried.
        device: that the network is on.

    Returns:
        The folded network, or the network itself where nothing can be folded.

    Raises:
        MemoryError, RuntimeError: there is no memory to try the folded network. What is computed
            must not depend on that.
    """
    if not any(isinstance(layer, _NORMS) for layer in network.modules()):
        return network
    try:
        simpler = _fold_copy(network)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        logger.info("BatchNorm is not folded: the network's code cannot be followed: %s", error)
        return network
    if simpler is None:
        return network
    batch = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)
    exactly = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with torch.inference_mode(), exactly:
        try:
            theirs = run_by_onednn(network)(batch)
            ours = run_by_onednn(simpler)(batch)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        # of the network itself, for which the contract's check, which comes next, has the words; or
        # of the copy, as of code that reads more of a layer than its answer
        except Exception as error:
            logger.info("BatchNorm is not folded: the network fails: %s", error)
            return network
        difference = float((ours - theirs).square().mean().sqrt()) / max(
            1.0, float(theirs.abs().max())
        )
    if not difference <= TOLERANCES["float32"]:
        logger.warning("BatchNorm is not folded: the answer would differ by %.1e", difference)
        return network
    return simpler


def _fold_copy(network: nn.Module) -> nn.Module | None:
    """Fold the BatchNorms of a copy of the network; None if there is none to fold.

    Tracing its code tells which layers follow each other. The code itself stays, with the branches
    that tracing does not notice. One that uses a convolution without its BatchNorm, and that noise
    does not enter, is given the folded one: it would be computed wrongly.
    """
    folded = copy.deepcopy(network)
    graph = fx.Tracer().trace(folded)
    modules: Json = dict(folded.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    alone: set[fx.Node] = set()
    """Convolutions with their BatchNorm, if any, whose answer nothing else reads."""

    def module_called_by(node: Any, kinds: tuple[type[nn.Module], ...]) -> Any:
        """The module that a node calls, of such a kind, and which no other calls."""
        is_call = isinstance(node, fx.Node) and node.op == "call_module" and calls[node.target] == 1
        return modules[node.target] if is_call and type(modules[node.target]) in kinds else None

    count = 0
    for node in graph.nodes:
        before = _first_argument(node)
        if module_called_by(node, _CONVOLUTIONS) is not None and len(node.users) == 1:
            alone.add(node)
        elif before in alone and module_called_by(node, _ACTIVATIONS) is not None:
            modules[node.target].inplace = True
        elif before in alone and _fold_pair(
            folded, module_called_by(before, _CONVOLUTIONS), module_called_by(node, _NORMS)
        ):
            count += 1
            if len(node.users) == 1:
                alone.add(node)
    if not count:
        return None
    logger.info("BatchNorm is folded into %d convolutions", count)
    return folded


def _fold_pair(network: nn.Module, convolution: Any, norm: Any) -> bool:
    """Fold a layer into the convolution before it, wherever the network holds them."""
    if convolution is None or norm is None or norm.running_mean is None:
        return False
    transposed = isinstance(convolution, _TRANSPOSED)
    if transposed and convolution.groups > 1:  # its weights are (inputs, outputs / groups, …)
        return False
    fused = fuse_conv_bn_eval(convolution, norm, transpose=transposed)
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module is convolution:
            network.set_submodule(name, fused)
        elif module is norm:
            network.set_submodule(name, nn.Identity())
    return True


def _first_argument(node: fx.Node) -> Any:
    return node.args[0] if node.args else None
