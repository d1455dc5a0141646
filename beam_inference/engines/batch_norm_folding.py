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
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.nn.utils.fusion import fuse_conv_bn_eval

from beam_inference.config.fields import Json
from beam_inference.engines.linked_layers import Link, LinkedNetwork, ReadElsewhere, run_linked
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

    The network's code is traced, which fails where it depends on its input. What that does not
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
    if _are_all_hooked() or not any(isinstance(layer, _NORMS) for layer in network.modules()):
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
    difference = _difference(network, simpler, batch)
    if difference is None:
        return network
    if not difference <= TOLERANCES["float32"]:
        logger.warning("BatchNorm is not folded: the answer would differ by %.1e", difference)
        return network
    return LinkedNetwork(simpler, network)


def _difference(network: nn.Module, simpler: nn.Module, batch: torch.Tensor) -> float | None:
    """How far a folded network's answer is from the network's; None where either fails."""
    exactly = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with torch.no_grad(), exactly:
        try:
            # Labels and truth values, too, are numbers to whoever writes them.
            theirs = run_by_onednn(network)(batch.clone()).float()
            ours = run_linked(run_by_onednn(simpler), batch).float()
            other_axes = [axis for axis in range(theirs.ndim) if axis != 1]
            distance = (ours - theirs).square().mean(other_axes).sqrt()
            scale = theirs.abs().amax(other_axes).clamp(min=1)
            worst = float((distance / scale).max())
        except (MemoryError, torch.OutOfMemoryError):
            raise
        # of the network itself, for which the contract's check, which comes next, has the words, as
        # where it answers no tensor; or of the copy, whose layers code reads otherwise
        except (Exception, ReadElsewhere) as error:
            logger.info("BatchNorm is not folded: the network fails: %r", error)
            return None
        return worst


def _fold_copy(network: nn.Module) -> nn.Module | None:
    """Fold the BatchNorms of a copy of the network; None if there is none to fold.

    Tracing its code tells which layers follow each other. The code itself stays, with the branches
    that tracing does not notice: layers are linked, so that each knows whether it follows the one
    before it, and nothing else does.
    """
    parameters = {id(each): each for each in network.parameters()}  # most of its memory
    folded, traced = (copy.deepcopy(network, dict(parameters)) for _ in range(2))
    modules = [module for each in (network, folded, traced) for module in each.modules()]
    if len(set(modules)) < len(modules):  # by a __deepcopy__ of its own; nothing may be changed
        return None
    links = _link_layers(_Recorder().record(traced), dict(folded.named_modules()))
    for name, module in list(folded.named_modules(remove_duplicate=False)):
        if module in links:
            folded.set_submodule(name, links[module])
    count = sum(isinstance(module, _NORMS) for module in links)
    logger.info("BatchNorm is folded into %d convolutions", count)
    return folded if count else None


class _Recorder(fx.Tracer):
    """Records which layers a network calls, with which others' answers, in this thread alone.

    While ``fx.Tracer.trace`` does that, the calls of all modules of the process are others: what
    other threads run meanwhile would be recorded, too, and two of them would leave it so for ever.
    """

    def record(self, network: nn.Module) -> fx.Graph:
        """Run a network's code on a batch that stands for any.

        Args:
            network: a copy, of no use behind this.

        Raises:
            Exception: of any kind: its code depends on the batch.
        """
        self.root = network
        self.graph = fx.Graph()
        self.tensor_attrs = {}
        for name, module in network.named_modules():
            if name and self.is_leaf_module(module, name):
                # other code may be called with the layer, and is not for what stands for an array
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
                module.forward = partial(self._record_call, name)
        batch = self.create_proxy("placeholder", "batch", (), {})
        answer = self.create_arg(network.forward(batch))
        self.create_node("output", "output", (answer,), {})
        return self.graph

    def _record_call(self, name: str, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self.create_proxy("call_module", name, args, kwargs)


def _link_layers(graph: fx.Graph, modules: Json) -> dict[nn.Module, Link]:
    """Link the convolutions of a network, their BatchNorms, and activations that follow.

    Args:
        graph: which modules the network calls.
        modules: these modules, by their names.

    Returns:
        What replaces each of them.
    """
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    alone: set[nn.Module | None] = set()
    """Convolutions with their BatchNorm, if any, whose answer nothing else reads."""
    links: dict[nn.Module, Link] = {}

    def module_called_by(node: Any) -> Any:
        """The module that a node calls, if nothing else does so, or is called with it."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or calls[node.target] > 1:
            return None
        module = modules[str(node.target)]
        return module if _is_plain(module) else None

    for node in graph.nodes:
        layer = module_called_by(node)
        before = module_called_by(_first_argument(node))
        if type(layer) in _CONVOLUTIONS and len(node.users) == 1:
            alone.add(layer)
        elif before in alone and type(layer) in _ACTIVATIONS:
            overwriting = copy.copy(layer)  # not the layer itself, which other code may hold
            overwriting.inplace = True
            link = links.setdefault(before, Link(before, None))
            links[layer] = Link(overwriting, link)
        elif before in alone and type(layer) in _NORMS:
            fused = _fuse(before, layer)
            if fused is not None:
                links[before] = Link(fused, None)
                links[layer] = Link(nn.Identity(), links[before])
                if len(node.users) == 1:
                    alone.add(layer)
    return links


def _fuse(convolution: Any, norm: Any) -> nn.Module | None:
    """A convolution that does what it and the layer after it do; None if there is none."""
    transposed = isinstance(convolution, _TRANSPOSED)
    if transposed and convolution.groups > 1:  # its weights are (inputs, outputs / groups, …)
        return None
    if not isinstance(convolution, _CONVOLUTIONS) or norm.running_mean is None:
        return None
    fused: nn.Module = fuse_conv_bn_eval(convolution, norm, transpose=transposed)
    return fused


def _are_all_hooked() -> bool:
    """Whether code of others is called with each module of this process."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class does: no hooks read its answer, nor has it own code."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)  # nothing public
    return not (has_hooks or any(map(callable, vars(module).values())))


def _first_argument(node: fx.Node) -> Any:
    return node.args[0] if node.args else None
