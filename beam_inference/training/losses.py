"""Losses over voxels whose target is known, as sums that ranks can add up.

A loss is a sum over voxels or samples, divided by how much of it there is on all ranks together. So
ranks with unequal shares of known voxels give the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from beam_inference.training.config import LossConfig

AddUp: TypeAlias = Callable[[Tensor], Tensor]
"""The sum of a tensor over ranks."""

_NEVER_ZERO = 1e-6


@dataclass(frozen=True)
class Answers:
    """What a network answers to patches of one shape, and what it should.

    Attributes:
        logits: of the network (N, channels, Z, Y, X): of whole patches, or of this rank's parts.
        target: between 0 and 1, of the same shape; or numbers of classes (N, 1, Z, Y, X).
        known: where the target counts, of the target's shape.
    """

    logits: Tensor
    target: Tensor
    known: Tensor


def compute_loss(
    answers: Sequence[Answers],
    config: LossConfig,
    *,
    is_classes: bool,
    add_up: AddUp,
    add_up_patch: AddUp,
) -> Tensor:
    """This rank's part of the loss; the loss is the sum of all ranks' parts.

    Args:
        answers: to patches of each shape, at least one.
        config: which loss.
        is_classes: whether the channels are classes of which each voxel has one.
        add_up: adds over ranks, without gradient.
        add_up_patch: adds over the ranks that share patches, with gradients.
    """
    terms = [_compare(each, is_classes) for each in answers]
    weights = _voxel_weights(terms, config.balance, is_classes, add_up)
    losses = _total([each.losses * w for each, w in zip(terms, weights, strict=True)])
    entropy = losses / add_up(_total(weights)).clamp_min(_NEVER_ZERO)
    if config.kind == "cross_entropy":
        return entropy
    dice = _dice_loss(terms, add_up, add_up_patch)
    return config.dice * dice + (1 - config.dice) * entropy


@dataclass(frozen=True)
class _Terms:
    """What a loss over patches of one shape is made of.

    Attributes:
        losses: cross-entropy of each voxel (N, channels or 1, Z, Y, X).
        wanted: shares between 0 and 1 (N, channels, Z, Y, X).
        predicted: likewise.
        known: where they count (N, channels or 1, Z, Y, X).
    """

    losses: Tensor
    wanted: Tensor
    predicted: Tensor
    known: Tensor


def _compare(answers: Answers, is_classes: bool) -> _Terms:
    logits = answers.logits.float()
    target = answers.target
    if is_classes:
        numbers = target[:, 0].long()
        losses = functional.cross_entropy(logits, numbers, reduction="none")[:, None]
        wanted = functional.one_hot(numbers, logits.shape[1]).movedim(-1, 1).float()
        return _Terms(losses, wanted, logits.softmax(1), answers.known)
    losses = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return _Terms(losses, target, logits.sigmoid(), answers.known)


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.sum() for each in values]).sum()


def _voxel_weights(
    terms: Sequence[_Terms], balance: float, is_classes: bool, add_up: AddUp
) -> list[Tensor]:
    """Weights of voxels, of the shapes of ``known``; classes are counted over all ranks."""
    weights = [each.known.float() for each in terms]
    if balance == 0:
        return weights
    classes = [
        [wanted[:, None] for wanted in each.wanted.unbind(1)]
        if is_classes
        else [1 - each.wanted, each.wanted]
        for each in terms
    ]
    total = add_up(_total(weights))
    balanced = [torch.zeros_like(each) for each in weights]
    for members in zip(*classes, strict=True):
        counted = [is_one * w for is_one, w in zip(members, weights, strict=True)]
        share = add_up(_total(counted)) / total.clamp_min(_NEVER_ZERO)
        balanced = [
            b + each / share.clamp_min(_NEVER_ZERO)
            for b, each in zip(balanced, counted, strict=True)
        ]
    return [
        (1 - balance) * w + balance * b / len(classes[0])
        for w, b in zip(weights, balanced, strict=True)
    ]


def _dice_loss(terms: Sequence[_Terms], add_up: AddUp, add_up_patch: AddUp) -> Tensor:
    """1 - Dice, of each sample and channel in which anything is known; their mean.

    Of a patch that ranks share, each of them has the whole Dice. All count it, in the sum of the
    losses as in their number.
    """
    axes = (2, 3, 4)
    losses = []
    counted = []
    for each in terms:
        known = each.known.expand_as(each.wanted).float()
        both = add_up_patch((each.predicted * each.wanted * known).sum(axes))
        either = add_up_patch(((each.predicted + each.wanted) * known).sum(axes))
        has_any = (add_up_patch(known.sum(axes)) > 0).float()
        losses.append((1 - (2 * both + 1) / (either + 1)) * has_any)
        counted.append(has_any)
    return _total(losses) / add_up(_total(counted)).clamp_min(1.0)
