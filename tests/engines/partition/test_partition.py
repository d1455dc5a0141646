"""Test that networks divided over a mesh answer, and learn, as they do undivided."""

import warnings
from contextlib import suppress
from threading import Lock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.share import name_layers, own_part, run_divided
from beam_inference.errors import ModelContractError
from beam_inference.residual_unet import ResidualUNet
from tests.engines.partition.meshes import Members, infer, join_parts, train
from tests.networks.meshnet import MeshNet

MESHES = [(1, 1, 2), (1, 2, 2), (2, 2, 2)]
SLOW_MESHES = [
    MESHES[0],
    *(pytest.param(each, marks=pytest.mark.slow) for each in MESHES[1:]),
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def members():
    """A mesh by its shape; each is made once."""
    made = {}

    def of(shape):
        if shape not in made:
            made[shape] = Members(shape)
        return made[shape]

    yield of
    for each in made.values():
        each.close()


def enlarge(network):
    """Weights that keep values from vanishing over many layers, and norms that do something."""
    for module in network.modules():
        if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm3d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        if getattr(module, "affine", False):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return network


def distance(found, expected):
    """The largest difference, as a share of the largest value, or of 1."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1))


def check_answers(members, network, batch):
    with torch.inference_mode():
        expected = network(batch)
    assert expected.abs().max() > 0.01
    found = infer(members, network, batch)
    assert found.shape == expected.shape
    assert distance(found, expected) <= 1e-5


def check_gradients(members, network, batch):
    whole = batch.clone().requires_grad_()
    network.zero_grad()
    answer = network(whole)
    weights = torch.randn_like(answer.detach()) / answer[0].numel() ** 0.5
    (answer * weights).sum().backward()
    inputs, parameters = train(members, network, batch, weights)
    for found, mesh in zip(inputs, members.meshes, strict=True):
        assert distance(found, own_part(whole.grad, mesh)) <= 1e-4
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            assert distance(parameters[name], parameter.grad) <= 1e-4, name


def residual_unet(norm):
    """The residual U-Net, with another normalisation in its place."""
    network = ResidualUNet(output_channels=2, widths=(4, 6, 8), normalization="instance")
    if norm != "instance":
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.InstanceNorm3d):
                    n = child.num_features
                    other = nn.BatchNorm3d(n) if norm == "batch" else nn.GroupNorm(2, n)
                    setattr(module, name, other)
    return enlarge(network)


class StridedUNet(nn.Module):
    """Strides down, transposed convolutions up, concatenations between."""

    def __init__(self, kernel=2):
        super().__init__()
        self.enter = nn.Conv3d(1, 4, 3, padding=1)
        self.down = nn.Conv3d(4, 8, 3, stride=2, padding=1)
        self.norm = nn.InstanceNorm3d(8, affine=True)
        padding = (kernel - 2) // 2
        further = kernel % 2
        self.up = nn.ConvTranspose3d(
            8, 4, kernel, stride=2, padding=padding + further, output_padding=further
        )
        self.leave = nn.Conv3d(8, 2, 3, padding=1, groups=2)

    def forward(self, x):
        first = functional.gelu(self.enter(x))
        up = self.up(self.norm(self.down(first)))
        return self.leave(torch.cat([first, up[:, :, : first.shape[2]]], 1))


@pytest.mark.parametrize("shape", SLOW_MESHES)
@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_residual_unets(members, shape, norm):
    network = residual_unet(norm)
    batch = torch.randn(1, 1, 5, 12, 20)
    check_answers(members(shape), network.eval(), batch)
    check_gradients(members(shape), network.train(), batch)


@pytest.mark.parametrize("shape", SLOW_MESHES)
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_strides_and_transposed_convolutions(members, shape, kernel):
    network = enlarge(StridedUNet(kernel))
    batch = torch.randn(2, 1, 6, 12, 18)
    check_answers(members(shape), network, batch)
    check_gradients(members(shape), network, batch)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("size", [(24, 40, 36), (19, 21, 23)])
def test_meshnet_reaches_beyond_neighbours(members, shape, size):
    network = enlarge(MeshNet())
    batch = torch.randn(1, 1, *size)
    check_answers(members(shape), network, batch)
    check_gradients(members(shape), network, batch)


def nnunet_network(kind):
    """A small network of nnU-Net's."""
    architectures = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    further = {"n_conv_per_stage": 2} if kind == "PlainConvUNet" else {"n_blocks_per_stage": [1, 2]}
    return getattr(architectures, kind)(
        1,
        2,
        [4, 8],
        nn.Conv3d,
        [[1, 3, 3], [3, 3, 3]],
        [[1, 1, 1], [1, 2, 2]],
        num_classes=3,
        n_conv_per_stage_decoder=[1],
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        **further,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("kind", ["PlainConvUNet", "ResidualEncoderUNet"])
def test_networks_of_nnunet(members, shape, kind):
    network = enlarge(nnunet_network(kind))
    batch = torch.randn(1, 1, 7, 14, 22)
    check_answers(members(shape), network, batch)
    check_gradients(members(shape), network, batch)


class Chain(nn.Sequential):
    """Layers one after the other, named as they are printed."""


class HalfChanged(nn.Module):
    """Changes a copy of a half in place, or the half itself where that is one piece of memory."""

    def forward(self, x):
        y = x * 1
        half = y[..., : y.shape[-1] // 2].contiguous()
        return y + functional.pad(half.relu_(), (0, y.shape[-1] - half.shape[-1]))


def layers_of(names, channels):
    """Layers by name; each keeps the number of channels."""
    made = {
        "convolution": lambda: nn.Conv3d(channels, channels, 3, padding=1),
        "valid": lambda: nn.Conv3d(channels, channels, (1, 2, 3)),
        "same": lambda: nn.Conv3d(channels, channels, (1, 5, 3), padding="same"),
        "strided": lambda: nn.Conv3d(channels, channels, 3, stride=2, padding=1),
        "strided_far": lambda: nn.Conv3d(channels, channels, 2, stride=(1, 3, 2), padding=1),
        "strided_over_padding": lambda: nn.Conv3d(
            channels, channels, (3, 3, 1), stride=(1, 1, 2), padding=1
        ),
        "dilated": lambda: nn.Conv3d(channels, channels, 3, padding=3, dilation=3),
        "grouped": lambda: nn.Conv3d(channels, channels, 3, padding=1, groups=channels),
        "reflect": lambda: nn.Conv3d(channels, channels, 3, padding=1, padding_mode="replicate"),
        "transposed": lambda: nn.ConvTranspose3d(channels, channels, 2, stride=2),
        "transposed_far": lambda: nn.ConvTranspose3d(
            channels, channels, 3, stride=2, padding=1, output_padding=1
        ),
        "transposed_gaps": lambda: nn.ConvTranspose3d(
            channels,
            channels,
            (1, 2, 1),
            stride=(1, 4, 2),
            padding=(0, 1, 0),
            output_padding=(0, 2, 1),
        ),
        "transposed_one": lambda: nn.ConvTranspose3d(channels, channels, 3, padding=1),
        "max": lambda: nn.MaxPool3d(2),
        "max_overlapping": lambda: nn.MaxPool3d(3, stride=2, padding=1),
        "max_ceil": lambda: nn.MaxPool3d(2, ceil_mode=True),
        "average": lambda: nn.AvgPool3d(3, stride=1, padding=1),
        "average_inside": lambda: nn.AvgPool3d(3, 2, padding=1, count_include_pad=False),
        "nearest": lambda: nn.Upsample(scale_factor=2),
        "linear": lambda: nn.Upsample(scale_factor=(1, 2, 2), mode="trilinear"),
        "corners": lambda: nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True),
        "size": lambda: nn.Upsample(size=(5, 9, 7), mode="trilinear"),
        "fraction": lambda: nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
        # Where a factor such as 1.3 keeps the length, PyTorch's gradients are not of its answer.
        "fraction_less": lambda: nn.Upsample(scale_factor=(0.7, 1.7, 0.3), mode="nearest"),
        "cropped": lambda: nn.ZeroPad3d((-3, -1, -2, 0, 0, -1)),
        "cropped_far": lambda: nn.ZeroPad3d((0, -7, -6, 0, 0, 0)),
        "padded": lambda: nn.ConstantPad3d((2, 3, 1, 1, 0, 2), 0.5),
        "shifted": lambda: nn.ConstantPad3d((4, -3, -2, 5, -1, 1), -0.5),
        "instance": lambda: nn.InstanceNorm3d(channels, affine=True),
        "batch": lambda: nn.BatchNorm3d(channels),
        "group": lambda: nn.GroupNorm(2, channels),
        "prelu": lambda: nn.PReLU(channels),
        "silu": nn.SiLU,
        "relu": lambda: nn.Sequential(nn.Identity(), nn.LeakyReLU(inplace=True)),
        "softmax": lambda: nn.Softmax(1),
        "half_changed": HalfChanged,
    }
    return [made[name]() for name in names], sorted(made)


LAYERS = layers_of([], 4)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", MESHES)
def test_each_layer(members, shape, name):
    layers, _ = layers_of([name], 4)
    network = enlarge(Chain(nn.Conv3d(1, 4, 1), *layers))
    for size in [(6, 8, 10), (5, 7, 9)]:
        batch = torch.randn(2, 1, *size)
        check_answers(members(shape), network.eval(), batch)
        check_gradients(members(shape), network.train(), batch)


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4),
    size=st.tuples(*[st.integers(4, 13)] * 3),
    shape=st.sampled_from([*MESHES, (1, 3, 1)]),
)
def test_random_networks(members, names, size, shape):
    torch.manual_seed(len(names))
    layers, _ = layers_of(names, 4)
    network = enlarge(Chain(nn.Conv3d(1, 4, 1), *layers))
    batch = torch.randn(1, 1, *size)
    try:
        answer = network.eval()(batch)
        network.train()(batch).sum().backward()
    except (RuntimeError, ValueError):
        return  # smaller than a window, one value to normalise, or changed after its use
    if answer.numel() and answer[0].numel() < 4**7 and answer.abs().max() > 0.01:
        with suppress(ModelContractError):  # too thin a share for the border that is repeated
            check_answers(members(shape), network.eval(), batch)
            check_gradients(members(shape), network.train(), batch)


class Gate(nn.Module):
    """Squeeze and excitation, in ways that a traced graph would have to know."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv3d(1, 4, 3, padding=1)
        self.gate = nn.Conv3d(4, 4, 1)

    def forward(self, x):
        y = self.layer(x)
        y *= self.gate(y.mean((2, 3, 4), keepdim=True)).sigmoid()
        y = functional.adaptive_avg_pool3d(y, 1) + y
        low, high = y.chunk(2, 1)
        if x.shape[-1] % 2:
            low = torch.where(low > 0, low, high)
        padded = functional.pad(torch.cat([low, high], dim=1), (2, 1, 0, -1, 1, 1))
        return functional.interpolate(padded[:, :2, 1:-1], size=x.shape[2:], mode="nearest")


@pytest.mark.parametrize("shape", SLOW_MESHES)
def test_functions_beside_modules(members, shape):
    network = enlarge(Gate())
    for size in [(6, 8, 10), (5, 7, 9)]:
        batch = torch.randn(2, 1, *size)
        check_answers(members(shape), network, batch)
        check_gradients(members(shape), network, batch)


def test_running_statistics_are_of_the_whole_patch(members):
    batch = torch.randn(2, 3, 4, 6, 7) * 3 + 1
    expected = nn.BatchNorm3d(3)
    expected(batch)

    def run(mesh):
        network = nn.BatchNorm3d(3)
        run_divided(network, own_part(batch, mesh), batch.shape[2:], mesh)
        return network

    for found in members((1, 1, 2)).run(run):
        torch.testing.assert_close(found.running_mean, expected.running_mean)
        torch.testing.assert_close(found.running_var, expected.running_var)


def test_shares_may_be_empty(members):
    network = enlarge(nn.Sequential(nn.Conv3d(1, 4, 3, stride=4, padding=1), nn.Conv3d(4, 2, 1)))
    batch = torch.randn(1, 1, 4, 4, 4)
    check_answers(members((1, 1, 2)), network, batch)
    check_gradients(members((1, 1, 2)), network, batch)


class PaddedUNet(nn.Module):
    """A U-Net along x, whose enlarged arrays are padded to the extent of what lies beside them."""

    def __init__(self, depth, is_padded):
        super().__init__()
        margins = (0, 0, int(is_padded))
        self.down = nn.ModuleList(
            nn.Conv3d(1 if n == 0 else 2, 2, (1, 1, 3), padding=margins) for n in range(depth + 1)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(2, 2, (1, 1, 2), stride=(1, 1, 2)) for _ in range(depth)
        )
        self.merge = nn.ModuleList(
            nn.Conv3d(4, 2, (1, 1, 3), padding=(0, 0, 1)) for _ in range(depth)
        )

    def forward(self, x):
        beside = []
        for layer in self.down[:-1]:
            beside.append(torch.relu(layer(x)))
            x = functional.max_pool3d(beside[-1], (1, 1, 2))
        x = torch.relu(self.down[-1](x))
        for enlarge_, merge in zip(self.up, self.merge, strict=True):
            x = enlarge_(x)
            other = beside.pop()
            room = other.shape[-1] - x.shape[-1]
            x = functional.pad(x, [room // 2, room - room // 2])
            x = torch.relu(merge(torch.cat([other, x], 1)))
        return x


@pytest.mark.parametrize(
    ("shape", "length", "depth", "is_padded"),
    [
        ((1, 1, 2), 18, 2, False),
        ((1, 1, 3), 38, 3, False),
        ((1, 1, 4), 22, 3, True),
        ((1, 1, 4), 9, 2, True),
    ],
)
def test_only_members_at_a_face_pad_where_others_have_no_voxels(
    members, shape, length, depth, is_padded
):
    network = enlarge(PaddedUNet(depth, is_padded))
    batch = torch.randn(1, 1, 2, 2, length)
    check_answers(members(shape), network, batch)
    check_gradients(members(shape), network, batch)


class Resized(nn.Module):
    def __init__(self, mode, **extent):
        super().__init__()
        self.enter = nn.Conv3d(1, 2, 3, padding=1)
        self.extent = extent
        self.mode = mode

    def forward(self, x):
        return functional.interpolate(self.enter(x), mode=self.mode, **self.extent)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    ("length", "extent"),
    [
        (26, {"size": (4, 4, 44)}),
        (39, {"size": (4, 4, 69)}),
        (24, {"size": (4, 4, 37)}),
        (32, {"scale_factor": 1.3}),
        (32, {"scale_factor": 2.3}),
    ],
)
def test_the_nearest_voxel_is_the_one_that_pytorch_takes(members, mode, length, extent):
    """It rounds in single precision: with these extents, otherwise than in double precision."""
    check_answers(members((1, 1, 2)), Resized(mode, **extent), torch.randn(1, 1, 4, 4, length))


class CutAndPadded(nn.Module):
    def __init__(self, front, mode="constant"):
        super().__init__()
        self.front = front
        self.mode = mode
        self.leave = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x):
        kept = x[..., self.front :] if self.front > 0 else x[..., : self.front]
        margins = (self.front, 0) if self.front > 0 else (0, -self.front)
        return self.leave(functional.pad(kept, margins, self.mode))


@pytest.mark.parametrize("front", [8, 9, 13, -8, -9, -13])
def test_what_is_cut_off_may_be_padded_again(members, front):
    check_answers(members((1, 1, 2)), CutAndPadded(front), torch.randn(1, 1, 4, 4, 16))
    check_gradients(members((1, 1, 2)), CutAndPadded(front), torch.randn(1, 1, 4, 4, 16))


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_a_share_without_voxels_is_not_extended(members, mode):
    """All members say so: one alone would leave the others waiting for it."""
    batch = torch.randn(1, 1, 4, 4, 16)

    def run(mesh):
        with pytest.raises(ModelContractError, match="cannot be divided: a share"):
            run_divided(CutAndPadded(9, mode), own_part(batch, mesh), batch.shape[2:], mesh)
        return mesh.rank

    assert members((1, 1, 2)).run(run) == [0, 1]


def test_borders_may_be_reflected(members):
    network = nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Conv3d(2, 2, 3)
    )
    batch = torch.randn(1, 1, 5, 6, 9)
    check_answers(members((1, 1, 2)), network, batch)
    check_gradients(members((1, 1, 2)), network, batch)


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Flatten(2)

    def forward(self, x):
        return self.attention(x)


class Beside(nn.Module):
    """Arithmetic between an array and parts of it."""

    def __init__(self, combine):
        super().__init__()
        self.enter = nn.Conv3d(1, 2, 3, padding=1)
        self.leave = nn.Conv3d(2, 2, 3, padding=1)
        self.combine = combine

    def forward(self, x):
        return self.leave(self.combine(self.enter(x)))


@pytest.mark.parametrize("shape", SLOW_MESHES)
@pytest.mark.parametrize(
    "combine",
    [
        lambda y: y - y[:, :, 3:4],
        lambda y: y[:, :, :, 2:3] - y,
        lambda y: y * (1 + y[..., :1]),
        lambda y: y + y[:, :, 1:2, 2:3, 3:4],
        lambda y: torch.where(y > y[..., 4:5], y, -y),
        lambda y: y[:, :, 1:] * y[:, :, :-1],
    ],
)
def test_one_voxel_stands_for_all_of_an_axis(members, shape, combine):
    network = enlarge(Beside(combine))
    batch = torch.randn(2, 1, 6, 8, 10)
    check_answers(members(shape), network, batch)
    check_gradients(members(shape), network, batch)


@pytest.mark.parametrize(
    "end",
    [
        lambda x, y: y.add_(x),
        lambda x, y: y.mul_(2),
        lambda x, y: functional.relu(y, inplace=True),
        lambda x, y: y[..., 1:].mul_(x[..., 1:]),
    ],
)
def test_the_answer_may_be_changed_in_place_last(members, end):
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv3d(1, 1, 3, padding=1)

        def forward(self, x):
            return end(x, self.layer(x))

    batch = torch.randn(1, 1, 4, 6, 8)
    check_answers(members((1, 1, 2)), Ends(), batch)
    check_gradients(members((1, 1, 2)), Ends(), batch)


@pytest.mark.parametrize("further", [[], [nn.Conv3d(4, 4, 3, padding=1)]])
def test_a_share_may_be_made_of_padding_alone(members, further):
    """Backward such a member takes part in the exchanges of the layers before all the same."""
    edge = nn.Conv3d(4, 4, (3, 3, 1), stride=(1, 1, 2), padding=1)
    network = enlarge(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), edge, *further))
    batch = torch.randn(1, 1, 4, 4, 4)
    check_answers(members((1, 1, 3)), network, batch)
    check_gradients(members((1, 1, 3)), network, batch)


def is_changed_after(make):
    """A function that changes a second array in place, and the first where that is the same."""

    def combine(y):
        functional.relu_(make(y))
        return y

    return combine


@pytest.mark.parametrize("shape", SLOW_MESHES)
@pytest.mark.parametrize(
    "make",
    [
        lambda y: functional.dropout3d(y, 0.5, training=False),
        lambda y: functional.dropout(y, 0.5, training=False),
        lambda y: functional.dropout3d(y, 0.0, training=True),
        lambda y: functional.dropout(y, 0.0, training=True),
        lambda y: y.contiguous(),
        lambda y: y[..., :5].contiguous(),
        lambda y: y[..., 5:].contiguous(),
        lambda y: y[:, :, :3].contiguous(),
        lambda y: y[:, :1].contiguous(),
        lambda y: y[:1].contiguous(),
        lambda y: y[:1, :1, 1:3].contiguous(),
        lambda y: y.split(1, 1)[1].contiguous(),
        lambda y: y.chunk(2, 0)[1].contiguous(),
        lambda y: y[..., :5].detach().contiguous(),
        lambda y: y[..., :5].contiguous().contiguous(),
        lambda y: y[..., :5].float().contiguous(),
        lambda y: y[..., :5].double().contiguous(),
        lambda y: y[..., :5].type_as(y[..., 5:]),
        lambda y: y[..., :5].to(y[..., 5:]),
        lambda y: y.to(torch.float32),
        lambda y: y.to(torch.float64),
        lambda y: y[:1, :, :3].clone(),
        lambda y: y[..., 2:] if y[..., 2:].is_contiguous() else y[..., :2],
        lambda y: functional.pad(y[..., 2:], (2, 0)),
    ],
)
def test_what_is_changed_in_place_is_what_it_is_undivided(members, shape, make):
    """Some functions copy, or do not, by how the whole array lies in memory."""
    network = enlarge(Beside(is_changed_after(make)))
    check_answers(members(shape), network, torch.randn(2, 1, 6, 8, 10))


def test_a_mean_of_half_precision_is_not_a_sum_beyond_its_range(members):
    network = Beside(lambda y: y * (y.half() * 1000).mean((2, 3, 4), keepdim=True).float())
    check_answers(members((1, 1, 2)), network, 10 * torch.randn(1, 1, 8, 12, 16))


def test_arguments_may_have_the_names_of_numpy(members):
    network = Beside(lambda y: y - y.mean(axis=(2, 3, 4), keepdims=True))
    check_answers(members((1, 1, 2)), network, torch.randn(1, 1, 4, 6, 8))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Beside(lambda y: torch.add(y, 1, out=y)), r"add with out"),
        (Beside(lambda y: torch.mean(y, (2, 3, 4), out=torch.empty(0))), r"mean with out"),
        (Beside(lambda y: functional.adaptive_avg_pool3d(y, (1, None, None))), "than one voxel"),
        (
            Beside(lambda y: y.contiguous(memory_format=torch.channels_last_3d)),
            "another memory format",
        ),
        (Beside(lambda y: y.to(memory_format=torch.channels_last_3d)), "another memory format"),
        (Beside(lambda y: y + y[:, :, 1:]), r"array of \[3, 4, 4\] voxels does not fit one of"),
        (Beside(lambda y: y[:, :, :, :2] * y), r"array of \[4, 2, 4\] voxels does not fit one of"),
        (Beside(lambda y: y[:, :, :1].add_(y)), "does not fit one of"),
        (Beside(lambda y: y[:, :, :1] - y[..., :1]), "does not fit one of"),
        (Beside(lambda y: torch.cat([y[:, :1], y[:, :1, :1]], 1)), "does not fit one of"),
        (Beside(lambda y: y * len(torch.where(y > 0))), "gives no array with these arguments"),
        (Flattened(), r"attention \(Flatten\) cannot be divided: flatten"),
        (nn.Sequential(nn.Conv3d(1, 1, 3, padding_mode="circular", padding=1)), "mode circular"),
        (nn.Sequential(nn.AdaptiveAvgPool3d(2)), r"0 \(AdaptiveAvgPool3d\).*more than one voxel"),
        (nn.Sequential(nn.Softmax(4)), "along axis 4, which is divided"),
        (nn.AdaptiveAvgPool3d(1), "the network's answer must be one array"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(network, message):
    mesh = Mesh((1, 1, 1), 0, _NoGroup())
    name_layers(network, mesh)
    with pytest.raises(ModelContractError, match=message):
        run_divided(network, torch.randn(1, 1, 4, 4, 4), (4, 4, 4), mesh)


class _NoGroup:
    """A mesh of one has nobody to talk to."""

    def allreduce(self, tensors):
        class Done:
            def wait(self):
                return tensors

        return Done()


def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x.mean([2, 3, 4], True))


def change(x: torch.Tensor) -> torch.Tensor:
    return x.relu_()


with warnings.catch_warnings(action="ignore"):
    scripted_gate = torch.jit.script(gate)
    scripted_change = torch.jit.script(change)
    scripted_module = torch.jit.script(nn.Sequential(nn.Conv3d(1, 1, 1), nn.Sigmoid()))


class Gated(nn.Module):
    """A module with a child of TorchScript."""

    def __init__(self):
        super().__init__()
        self.gate = scripted_module

    def forward(self, x):
        return x * self.gate(x)


class Smoothed(torch.autograd.Function):
    """A function with a gradient of its own, which looks at neighbours."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return functional.avg_pool3d(gradient, 3, 1, 1)


@pytest.mark.parametrize(
    "network",
    [
        Beside(lambda y: y * scripted_gate(y)),
        Beside(lambda y: (scripted_change(y), y)[1]),
        Beside(lambda y: (scripted_change(y[..., 1:]), y)[1]),
        Beside(
            lambda y: y * torch.vmap(lambda each: each.mean().sigmoid())(y)[:, None, None, None]
        ),
        Beside(lambda y: y * torch.tensor(y).mean()),
        Beside(lambda y: y * torch.Tensor._make_subclass(torch.Tensor, y).mean()),
        Gated(),
    ],
)
def test_what_pytorch_does_not_ask_about_is_refused(network):
    """TorchScript and the like would take a member's part for the whole patch."""
    mesh = Mesh((1, 1, 1), 0, _NoGroup())
    for hooks in ([], name_layers(network, mesh)):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(ModelContractError, match="cannot be divided"),
        ):
            run_divided(network, torch.randn(1, 1, 4, 4, 4), (4, 4, 4), mesh)
        for hook in hooks:
            hook.remove()


def test_gradients_of_a_function_s_own_are_refused_and_its_answer_is_right(members):
    network = Beside(Smoothed.apply)
    batch = 5 * torch.randn(1, 1, 4, 6, 8)
    check_answers(members((1, 1, 2)), network, batch)
    with pytest.raises(ModelContractError, match="gradients are switched in round"):
        train(members((1, 1, 2)), network, batch, torch.ones(1, 2, 4, 6, 8))


def test_answers_are_joined_in_place(members):
    batch = torch.arange(4 * 5 * 7.0).reshape(1, 1, 4, 5, 7)
    parts = members((1, 2, 2)).run(
        lambda mesh: run_divided(nn.Identity(), own_part(batch, mesh), batch.shape[2:], mesh)
    )
    assert torch.equal(join_parts(parts), batch)


def test_dropped_channels_are_the_same_in_all_parts(members):
    batch = torch.ones(2, 8, 4, 6, 8)

    whole = draw(members((1, 2, 2)), nn.Dropout3d(0.5), batch)
    kept = whole[:, :, 0, 0, 0]
    assert torch.equal(whole, kept[:, :, None, None, None].expand_as(whole))
    assert set(kept.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("inplace", [False, True])
def test_dropped_voxels_are_others_in_each_part(members, inplace):
    batch = torch.ones(2, 8, 4, 6, 8)
    whole = draw(members((1, 1, 2)), nn.Dropout(0.25, inplace), batch.clone())
    assert {round(value, 4) for value in whole.unique().tolist()} == {0.0, 1.3333}
    assert not torch.equal(whole[..., :4], whole[..., 4:])
    assert abs(float(whole.mean()) - 1) < 0.1


def draw(members, network, batch):
    """The answer of members that draw the same numbers, as ranks that share samples do."""
    lock = Lock()

    def run(mesh):
        with lock:  # members are threads here, and there is one generator for all of them
            torch.manual_seed(3)
            return run_divided(network, own_part(batch, mesh), batch.shape[2:], mesh)

    return join_parts(members.run(run))


def test_an_input_that_is_changed_after_its_convolution_is_noticed(members):
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv3d(1, 2, 3, padding=1)
            self.second = nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, x):
            x = self.first(x)
            y = self.second(x)
            x.mul_(2)
            return y + x

    batch = torch.randn(1, 1, 4, 6, 8)
    with pytest.raises(RuntimeError, match="inplace operation"):
        Careless()(batch).sum().backward()
    with pytest.raises(RuntimeError, match="changed in place"):
        train(members((1, 1, 2)), Careless(), batch, torch.ones(1, 2, 4, 6, 8))
