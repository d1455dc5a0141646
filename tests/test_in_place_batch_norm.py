"""BatchNorm and leaky ReLU in place: the values and gradients of the plain pair, in less memory."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from beam_inference.residual_unet import InPlaceBatchNorm, ResidualUNet


class PlainPair(nn.Module):
    """What InPlaceBatchNorm computes, by PyTorch's own layers."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm3d(channels)
        self.activation = nn.LeakyReLU(0.01)

    def forward(self, x):
        return self.activation(self.norm(x))


def pair_like(layer):
    pair = PlainPair(len(layer.weight))
    with torch.no_grad():
        pair.norm.weight.copy_(layer.weight.abs() + layer.epsilon)
        pair.norm.bias.copy_(layer.bias)
    return pair


def random_layer(channels):
    layer = InPlaceBatchNorm(channels)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_()
    return layer


def test_values_gradients_and_statistics_are_the_plain_pairs():
    torch.manual_seed(0)
    layer = random_layer(3)
    pair = pair_like(layer)
    x = torch.randn(2, 3, 4, 6, 5) * 3 + 1
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    weights = torch.randn_like(x)
    answers = [each(data * 1) for each, data in zip((layer, pair), inputs, strict=True)]
    torch.testing.assert_close(*answers, rtol=0, atol=1e-5)
    for answer in answers:
        (answer * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, pair.norm.bias.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, pair.norm.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_mean, pair.norm.running_mean)
    torch.testing.assert_close(layer.running_var, pair.norm.running_var)
    torch.testing.assert_close(layer.eval()(x), pair.eval()(x), rtol=0, atol=1e-5)


def with_plain_pairs(network):
    """A copy of a network in which the layer is the plain pair."""
    for module in list(network.modules()):
        for key, child in list(module.named_children()):
            if isinstance(child, InPlaceBatchNorm):
                setattr(module, key, pair_like(child))
    return network


def saved_bytes(network, x):
    """Bytes that a forward pass keeps for the backward pass, weights and image left out."""
    storages = {}
    known = {each.untyped_storage().data_ptr() for each in [*network.parameters(), x]}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        answer = network(x)
        found = sum(storages.values())
    answer.square().mean().backward()
    return found


@pytest.mark.slow
def test_the_unet_keeps_little_and_has_the_same_gradients():
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(ResidualUNet(1, 3, normalization="batch").double())
    with_plain_pairs(networks[1]).double()
    x = torch.randn(1, 1, 4, 32, 32, dtype=torch.float64)
    kept, plain = (saved_bytes(network, x) for network in networks)
    assert kept <= 0.6 * plain, (kept, plain)
    for first, second in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=1e-5)


RANK = """
import sys, torch
from torch import distributed
from beam_inference.residual_unet import InPlaceBatchNorm
rank, port = int(sys.argv[1]), sys.argv[2]
store = f"file://{port}"
distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
torch.manual_seed(0)
x = torch.randn(5, 2, 3, 4, 4, dtype=torch.float64) * 2 + 1
part = (x[:1], x[1:])[rank].clone().requires_grad_()
layer = InPlaceBatchNorm(2).double()
layer((part * 1)).pow(3).sum().backward()
torch.save([part.grad, layer.weight.grad, layer.running_var], f"{port}.{rank}")
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_unequal_ranks_share_their_statistics(tmp_path):
    place = tmp_path / "store"
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(place)]) for rank in (0, 1)
    ]
    assert [each.wait(100) for each in ranks] == [0, 0]
    torch.manual_seed(0)
    x = (torch.randn(5, 2, 3, 4, 4, dtype=torch.float64) * 2 + 1).requires_grad_()
    layer = InPlaceBatchNorm(2).double()
    layer(x * 1).pow(3).sum().backward()
    (first, first_weight, variance), (second, second_weight, _) = (
        torch.load(f"{place}.{rank}") for rank in (0, 1)
    )
    torch.testing.assert_close(torch.cat([first, second]), x.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(first_weight + second_weight, layer.weight.grad, rtol=0, atol=1e-4)
    torch.testing.assert_close(variance, layer.running_var, rtol=0, atol=1e-5)
