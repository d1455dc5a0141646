"""Networks whose answer to a patch depends on its batch, and those whose answer does not."""

import numpy as np
import pytest
import torch
from torch import nn

from beam_inference.engines.batch_effect import effect_of_batch
from beam_inference.engines.torch_forward import torch_predictor
from beam_inference.operators.normalize import Normalization


class Of(nn.Module):
    """A network of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, batch):
        return self.function(batch)


def effect(network, patch=(4, 6, 8), dtype=np.uint8, batch_size=4):
    values = np.random.default_rng(1).integers(20, 200, (1, *patch)).astype(dtype)
    predictor = torch_predictor(network, torch.device("cpu"))
    return effect_of_batch(predictor, values, Normalization(), batch_size)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.uint64])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_networks_that_look_at_one_patch_alone(dtype, batch_size):
    torch.manual_seed(0)
    for network in (nn.Conv3d(1, 2, 3, padding=1), Of(lambda batch: batch), nn.InstanceNorm3d(1)):
        assert effect(network, (8, 16, 16), dtype, batch_size).is_none


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: batch - batch.mean(),
        lambda batch: batch / batch.std(),
        lambda batch: batch / batch.abs().max(),
        lambda batch: batch + batch.amin(),
        lambda batch: batch.flip(0),
        lambda batch: batch + batch.median(),
        lambda batch: batch[:1].expand_as(batch),
        lambda batch: batch * torch.arange(len(batch)).reshape(-1, 1, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_networks_that_mix_patches(function, dtype):
    assert not effect(Of(function), dtype=dtype).is_rounding


def test_a_channel_is_not_lost_beside_one_of_large_values():
    def network(batch):
        return torch.cat([0.05 * (batch - batch.mean()), batch * 1e4], 1)

    assert not effect(Of(network)).is_rounding


def test_blank_patches_say_nothing_and_are_replaced():
    predictor = torch_predictor(Of(lambda batch: batch - batch.mean()), torch.device("cpu"))
    blank = np.zeros((1, 4, 6, 8), np.uint8)
    assert not effect_of_batch(predictor, blank, Normalization(), 2).is_rounding


def test_not_a_number_is_an_effect():
    def first_alone(batch):
        batch[1:] = torch.nan
        return batch

    assert effect(Of(first_alone)).largest == np.inf


def test_last_bits_by_place():
    """As vectors of a processor have it: another function for what does not fill them."""

    def tail(batch):
        flat = batch.flatten()
        whole = flat.numel() // 16 * 16
        flat[whole:] *= 1 + 2**-23
        return flat.reshape(batch.shape)

    found = effect(Of(tail), (3, 5, 7))
    assert not found.is_none
    assert found.is_rounding
