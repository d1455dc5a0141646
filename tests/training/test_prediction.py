"""Predictions of ranks that share patches: losses and gradients of one that has them whole."""

import copy

import pytest
import torch
from torch import nn

from beam_inference.engines.partition.mesh import Mesh, add_up
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.residual_unet import ResidualUNet
from beam_inference.training.config import LossConfig
from beam_inference.training.losses import Answers, compute_loss
from beam_inference.training.prediction import PackedNetwork, predict, predict_part
from tests.engines.partition.meshes import Members

PATCH = (4, 8, 8)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def members():
    made = Members((2, 1, 2))
    yield made
    made.close()


def loss_of(network, batch, loss, mesh=None):
    """A rank's part of the loss, with its gradients in the network."""
    image, target, known = batch
    if mesh is None:
        packed = PackedNetwork(network, Mesh((1, 1, 1), 0, None))
        (prediction,) = predict(packed, [image], [PATCH], target.shape[1], CPU)
    else:
        prediction = predict_part(network, image, PATCH, target.shape[1], mesh, CPU)
    with_mesh = (lambda x: x) if mesh is None else (lambda x: add_up(x, mesh))
    part = compute_loss(
        [Answers(prediction.logits, prediction.cut(target), prediction.cut(known))],
        loss,
        is_classes=False,
        add_up=lambda x: with_mesh(x.detach()),
        add_up_patch=with_mesh,
    )
    part.backward()
    return part.detach(), prediction.whole().detach()


@pytest.mark.parametrize("kind", ["cross_entropy", "dice_cross_entropy"])
@pytest.mark.parametrize(
    ("network", "margin"),
    [
        (ResidualUNet(1, 2, widths=(2, 3), pooling=(1, 2, 2)), (0, 0, 0)),
        (ResidualUNet(1, 2, widths=(2, 3), pooling=(4, 2, 2)), (0, 0, 0)),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Conv3d(2, 2, 1)), (1, 1, 1)),
        (nn.Conv3d(1, 2, 3, padding=1), (1, 2, 2)),
    ],
    ids=["instance", "a share without voxels", "valid", "crop margin"],
)
def test_parts_of_losses_add_up(members, network, margin, kind):
    torch.manual_seed(1)
    shape = [n + 2 * m for n, m in zip(PATCH, margin, strict=True)]
    image = torch.randn(2, 1, *shape)
    target = (torch.rand(2, 2, *PATCH) > 0.7).float()
    known = torch.rand(2, 2, *PATCH) > 0.2
    known[1, 1] = False
    loss = LossConfig(kind=kind, balance=0.5)

    whole = copy.deepcopy(network)
    expected, logits = loss_of(whole, (image, target, known), loss)

    networks = [copy.deepcopy(network) for _ in members.meshes]
    results = members.run(
        lambda mesh: loss_of(networks[mesh.rank], (image, target, known), loss, mesh)
    )
    assert torch.isclose(sum(part for part, _ in results), expected, rtol=1e-5)
    torch.testing.assert_close(results[0][1], logits, rtol=0, atol=1e-5)
    assert all(whole.numel() == 0 for _, whole in results[1:])
    for name, parameter in whole.named_parameters():
        gradients = [dict(each.named_parameters())[name].grad for each in networks]
        assert all(gradient is not None for gradient in gradients), name
        torch.testing.assert_close(sum(gradients), parameter.grad, rtol=1e-4, atol=1e-5)


def test_what_a_mesh_cannot_do_is_told(members):
    image = torch.zeros(1, 1, *PATCH)
    for network, error, message in (
        (nn.Flatten(2), ModelContractError, "partition: .* cannot be divided: flatten"),
        (nn.Conv3d(1, 5, 1), ConfigError, r"returned \[1, 5, 4, 8, 8\]; expected 2 channels"),
        (nn.Conv3d(2, 2, 1), ModelContractError, "failed on an image of shape"),
    ):
        with pytest.raises(error, match=message):
            members.run(lambda mesh, of=network: predict_part(of, image, PATCH, 2, mesh, CPU))


@pytest.mark.parametrize("is_classes", [False, True])
@pytest.mark.parametrize("kind", ["cross_entropy", "dice_cross_entropy"])
def test_the_loss_of_several_shapes_is_that_of_one_batch_if_they_are_one(kind, is_classes):
    torch.manual_seed(1)
    logits = torch.randn(3, 2, *PATCH)
    target = (torch.rand(3, 1 if is_classes else 2, *PATCH) > 0.7).float()
    known = torch.rand(target.shape) > 0.2
    loss = LossConfig(kind=kind, balance=0.5)

    def judge(parts):
        answers = [Answers(logits[each], target[each], known[each]) for each in parts]
        same = {"add_up": lambda x: x, "add_up_patch": lambda x: x}
        return compute_loss(answers, loss, is_classes=is_classes, **same)

    whole = judge([slice(None)])
    torch.testing.assert_close(judge([slice(1), slice(1, None)]), whole, rtol=1e-6, atol=0)


def test_patches_of_several_shapes_are_answered_as_alone():
    torch.manual_seed(1)
    network = ResidualUNet(1, 2, widths=(2, 3), pooling=(1, 2, 2))
    packed = PackedNetwork(network, Mesh((1, 1, 1), 0, None))
    shapes = [PATCH, (2, 12, 4), (6, 4, 4)]
    images = [torch.randn(n, 1, *shape) for n, shape in enumerate(shapes, 1)]
    found = predict(packed, images, shapes, 2, CPU)
    for image, shape, each in zip(images, shapes, found, strict=True):
        for sample, logits in zip(image, each.logits, strict=True):
            (alone,) = predict(packed, [sample[None]], [shape], 2, CPU)
            torch.testing.assert_close(alone.logits[0], logits, rtol=0, atol=1e-6)
