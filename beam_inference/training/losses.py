"""Losses over voxels whose target is known, as sums that ranks can add up.

A loss is a sum over voxels or samples, divided by how much of it there is on all ranks together. So
ranks with unequal shares of known voxels give the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from beam_inference.training.config import LossConfig

AddUp: TypeAlias = Callable[[Tensor], Tensor]
"""The sum of a tensor over ranks."""

_NEVER_ZERO = 1e-6


def compute_loss(
    logits: Tensor,
    target: Tensor,
    known: Tensor,
    config: LossConfig,
    *,
    is_classes: bool,
    add_up: AddUp,
    add_up_patch: AddUp,
) -> Tensor:
    """This rank's part of the loss; the loss is the sum of all ranks' parts.

    Args:
        logits: of the network (N, channels, Z, Y, X): of whole patches, or of this rank's parts.
        target: between 0 and 1, of the same shape; or numbers of classes (N, 1, Z, Y, X).
        known: where the target counts, of the target's shape.
        config: which loss.
        is_classes: whether the channels are classes of which each voxel has one.
        add_up: adds over ranks, without gradient.
        add_up_patch: adds over the ranks that share patches, with gradients.
    """
    logits = logits.float()
    if is_classes:
        numbers = target[:, 0].long()
        losses = functional.cross_entropy(logits, numbers, reduction="none")[:, None]
        wanted = functional.one_hot(numbers, logits.shape[1]).movedim(-1, 1).float()
        predicted = logits.softmax(1)
    else:
        losses = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        wanted = target
        predicted = logits.sigmoid()
    weights = _voxel_weights(wanted, known, config.balance, is_classes, add_up)
    entropy = (losses * weights).sum() / add_up(weights.sum()).clamp_min(_NEVER_ZERO)
    if config.kind == "cross_entropy":
        return entropy
    dice = _dice_loss(predicted, wanted, known.expand_as(wanted).float(), add_up, add_up_patch)
    return config.dice * dice + (1 - config.dice) * entropy


def _voxel_weights(
    wanted: Tensor, known: Tensor, balance: float, is_classes: bool, add_up: AddUp
) -> Tensor:
    """Weights of voxels, of the shape of ``known``; classes are counted over all ranks."""
    weights = known.float()
    if balance == 0:
        return weights
    classes = [each[:, None] for each in wanted.unbind(1)] if is_classes else [1 - wanted, wanted]
    total = add_up(weights.sum())
    balanced = torch.zeros_like(weights)
    for each in classes:
        share = add_up((each * weights).sum()) / total.clamp_min(_NEVER_ZERO)
        balanced = balanced + each * weights / share.clamp_min(_NEVER_ZERO)
    return (1 - balance) * weights + balance * balanced / len(classes)


def _dice_loss(
    predicted: Tensor, wanted: Tensor, known: Tensor, add_up: AddUp, add_up_patch: AddUp
) -> Tensor:
    """1 - Dice, of each sample and channel in which anything is known; their mean.

    Of a patch that ranks share, each of them has the whole Dice. All count it, in the sum of the
    losses as in their number.
    """
    axes = (2, 3, 4)
    both = add_up_patch((predicted * wanted * known).sum(axes))
    each = add_up_patch(((predicted + wanted) * known).sum(axes))
    has_any = (add_up_patch(known.sum(axes)) > 0).float()
    losses = (1 - (2 * both + 1) / (each + 1)) * has_any
    return losses.sum() / add_up(has_any.sum()).clamp_min(1.0)
