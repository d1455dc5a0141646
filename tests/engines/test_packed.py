"""Arrays of several shapes in one batch: each as alone, with the statistics of all of them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from beam_inference.engines.packed import Pack, has_batch_statistics, run_packed
from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.share import name_layers
from beam_inference.errors import ModelContractError
from beam_inference.residual_unet import InPlaceBatchNorm, ResidualUNet

SHAPES = ((1, 4, 8, 8), (2, 4, 12, 8), (3, 2, 4, 16))
"""Samples, z, y, x of each array."""


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone():
    return Pack(Mesh((1, 1, 1), 0, None))


def random_arrays(shapes=SHAPES, channels=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, channels, *shape, generator=generator, dtype=torch.float64) * 2 + 1
        for n, *shape in shapes
    ]


class Skips(nn.Module):
    """A network that reads shapes, crops, pads and joins, with some normalisation."""

    def __init__(self, make_norm):
        super().__init__()
        self.first = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = make_norm(4)
        self.down = nn.AvgPool3d(2, ceil_mode=False)
        self.inner = nn.Conv3d(4, 4, 3, padding=1, padding_mode="replicate")
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.last = nn.Conv3d(12, 3, 3)

    def forward(self, x):
        x = functional.leaky_relu(self.norm(self.first(x)), 0.1)
        below = self.inner(self.down(x))
        grown = functional.interpolate(below, size=x.shape[2:], mode="nearest")
        batch, channels, *_ = x.shape
        assert (batch, channels) == (x.size(0), 4)
        missing = x.shape[-1] - grown.shape[-1]
        grown = functional.pad(grown, (0, missing))
        if self.up(below).shape != x.shape:
            raise AssertionError
        x = torch.cat([x, grown, self.up(below)], dim=1)
        x = x - x.mean((2, 3, 4), keepdim=True)
        x *= 2
        return self.last(functional.pad(x, (1, 1, 1, 1, 1, 1)))[:, 1:].softmax(1)


NETWORKS = {
    "instance": lambda: Skips(nn.InstanceNorm3d),
    "group": lambda: Skips(lambda n: nn.GroupNorm(2, n)),
    "residual U-Net": lambda: ResidualUNet(2, 3, (3, 4), (1, 2, 2)),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
@pytest.mark.parametrize("with_batch_norm", [False, True])
def test_each_array_is_as_alone(network, with_batch_norm):
    torch.manual_seed(1)
    made = network().double()
    if with_batch_norm:  # of no effect, but all functions are run on packs
        made = nn.Sequential(made, nn.BatchNorm3d(2 if isinstance(made, Skips) else 3).double())
    arrays = random_arrays()
    packed = run_packed(made, arrays, alone())
    expected = [(made[0] if with_batch_norm else made)(each) for each in arrays]
    if with_batch_norm:
        expected = normalize(expected)
    for found, each in zip(packed, expected, strict=True):
        torch.testing.assert_close(found, each, rtol=0, atol=1e-6)


def normalize(arrays, scale=1.0, bias=0.0):
    """Batch normalisation by brute force: all voxels of all arrays in one row."""
    rows = torch.cat([each.movedim(1, 0).flatten(1) for each in arrays], 1)
    mean = rows.mean(1).view(1, -1, 1, 1, 1)
    variance = rows.var(1, correction=0).view(1, -1, 1, 1, 1)
    return [(each - mean) / (variance + 1e-5).sqrt() * scale + bias for each in arrays]


@pytest.mark.parametrize("layer", [nn.BatchNorm3d, InPlaceBatchNorm])
def test_batch_normalisation_counts_every_voxel_of_all_arrays(layer):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), layer(3), nn.Conv3d(3, 2, 1)).double()
    other = copy.deepcopy(network)
    arrays = random_arrays()
    weights = random_arrays()
    answers = run_packed(network, arrays, alone())
    sum((a * w).sum() for a, w in zip(answers, weights, strict=True)).backward()

    scale = other[1].weight.view(1, -1, 1, 1, 1) + (0 if layer is nn.BatchNorm3d else 1e-5)
    normal = normalize([other[0](each) for each in arrays], scale)
    if layer is InPlaceBatchNorm:
        normal = [functional.leaky_relu(each, 0.01) for each in normal]
    expected = [other[2](each) for each in normal]
    sum((a * w).sum() for a, w in zip(expected, weights, strict=True)).backward()
    for found, each in zip(answers, expected, strict=True):
        torch.testing.assert_close(found, each, rtol=0, atol=1e-6)
    for name, parameter in network.named_parameters():
        if name != "1.bias":
            reference = dict(other.named_parameters())[name].grad
            torch.testing.assert_close(parameter.grad, reference, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("normalization", ["batch", "plain batch"])
def test_arrays_of_one_shape_are_one_batch(normalization):
    torch.manual_seed(1)
    network = ResidualUNet(2, 3, (3, 4), (1, 2, 2), normalization="batch").double()
    if normalization == "plain batch":
        network = NETWORKS["residual U-Net"]().double()
        for module in list(network.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.InstanceNorm3d):
                    setattr(module, name, nn.BatchNorm3d(child.num_features).double())
    other = copy.deepcopy(network)
    arrays = random_arrays([(n, 4, 8, 8) for n in (1, 2, 3)])
    answers = torch.cat(run_packed(network, arrays, alone()))
    expected = other(torch.cat(arrays))
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-6)
    answers.square().sum().backward()
    expected.square().sum().backward()
    for first, second in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-6, atol=1e-6)
    for first, second in zip(network.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def kept_bytes(call):
    """Bytes of the tensors that are kept for gradients."""
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept_alive = call()
    del kept_alive
    return sum(storages.values())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_pack_keeps_no_more_than_a_batch(precision):
    """So a step that was measured with one shape tells what one with several takes."""
    network = nn.Sequential(nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 2, 3))
    arrays = [torch.rand(1, 1, 12, 16, 16), torch.rand(2, 1, 12, 16, 16)]
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        together = kept_bytes(lambda: network(torch.cat(arrays)))
        packed = kept_bytes(lambda: run_packed(network, arrays, alone()))
    assert packed <= 1.01 * together


@pytest.mark.parametrize("others", [[], [nn.BatchNorm3d(2)]], ids=["alone", "batch norm"])
def test_running_statistics_of_samples_are_refused(others):
    norm = nn.InstanceNorm3d(2, track_running_stats=True)
    network = nn.Sequential(norm, *others).double()
    with pytest.raises(ModelContractError, match="instance_norm with track_running_stats"):
        run_packed(network, random_arrays(), alone())
    run_packed(network.eval(), random_arrays(), alone())


def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x.mean([2, 3, 4], True))


with warnings.catch_warnings(action="ignore"):
    scripted_gate = torch.jit.script(gate)


@pytest.mark.parametrize("count", [1, 2])
def test_what_pytorch_does_not_ask_about_is_refused(count):
    """Of one array, too: TorchScript took a pack without values for an array of its shape."""
    with pytest.raises(ModelContractError, match="cannot take them together"):
        run_packed(Refused(scripted_gate), random_arrays()[:count], alone())


class Refused(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm = nn.BatchNorm3d(2).double()
        self.inner = nn.Identity()
        self.inner.forward = function

    def forward(self, x):
        return self.inner(self.norm(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x - x.mean(), "mean over all samples"),
        (lambda x: x.softmax(0), "softmax over all samples"),
        (lambda x: torch.cat([x, x]), "cat over all samples"),
        (lambda x: x[:1], "an index that leaves out samples"),
        (lambda x: x.flatten(2), "flatten"),
        (lambda x: x if x.shape[4] > 8 else x * 2, "a decision that differs"),
        (
            lambda x: checkpoint(torch.relu, x, use_reentrant=True),
            "gradients are switched off",
        ),
        (lambda x: x * len(range(x.shape[-1])), "a number that differs"),
    ],
)
def test_what_may_look_at_several_samples_is_refused_by_name(function, message):
    network = Refused(function)
    pack = alone()
    name_layers(network, pack.mesh)
    with pytest.raises(ModelContractError, match=rf"inner \(Identity\) cannot .*: {message}"):
        run_packed(network, random_arrays(), pack)
    run_packed(network.eval(), random_arrays()[:1], pack)


def test_statistics_beside_the_layers_that_are_known_are_refused():
    class Own(nn.Module):
        def forward(self, x):
            return functional.batch_norm(x, None, None, training=True)

    with pytest.raises(ModelContractError, match="expected a module for it"):
        run_packed(Own(), random_arrays(), alone())


def test_layers_that_look_at_samples_are_known_by_their_state():
    assert has_batch_statistics(nn.BatchNorm3d(2))
    assert has_batch_statistics(nn.BatchNorm3d(2, track_running_stats=False).eval())
    assert has_batch_statistics(nn.Sequential(InPlaceBatchNorm(2)))
    assert not has_batch_statistics(nn.Sequential(InPlaceBatchNorm(2), nn.BatchNorm2d(2)).eval())
    assert not has_batch_statistics(ResidualUNet())
