"""BatchNorm folded into convolutions, where the network's code can be traced."""

import copy
import threading

import pytest
import torch
from torch import nn

from beam_inference.engines.batch_norm_folding import fold_batch_norm
from beam_inference.engines.linked_layers import Link
from beam_inference.engines.onednn import run_by_onednn

CPU = torch.device("cpu")


def settled(network):
    """In eval mode, with statistics and weights as after some training."""
    torch.manual_seed(1)
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.normal_()
    return network.eval()


def norms(network):
    return sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())


def folded_norms(network):
    links = [each for each in network.changed.modules() if isinstance(each, Link)]
    return sum(isinstance(each.layer, nn.Identity) for each in links)


class Skip(nn.Module):
    """A residual block, whose addition wants what the activation must not overwrite."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv3d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(4)
        self.again = nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1))
        self.leave = nn.BatchNorm3d(4)
        self.act = nn.ReLU()
        self.last = nn.ReLU()

    def forward(self, x):
        x = self.norm(self.enter(x))
        y = self.act(x)
        return self.last(self.leave(self.again(y))) + x


class Shared(nn.Module):
    """One convolution called twice: a BatchNorm cannot be folded into both."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 1)
        self.norm = nn.BatchNorm3d(2)

    def forward(self, x):
        return self.norm(self.conv(x)) + self.conv(x)


class Types(nn.Module):
    """What following it with a stand-in for an array does not notice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 1)
        self.norm = nn.BatchNorm3d(2)

    def forward(self, x):
        return self.norm(self.conv(x)) * (2 if isinstance(x, torch.Tensor) else 1)


class Guarded(Types):
    """A branch on values that tracing does not see, of values that noise does not have."""

    def forward(self, x):
        if isinstance(x, torch.Tensor) and x.max() > 1.5:
            x = x / 255
        return self.norm(self.conv(x))


class Aliases(Types):
    """Layers that the network holds under two names, and in two places."""

    def __init__(self):
        super().__init__()
        self.again = self.conv
        self.both = nn.Sequential(self.again, self.norm)

    def forward(self, x):
        return self.norm(self.both[0](x))


class Reads(Types):
    """Code that reads more of a layer than its answer."""

    def forward(self, x):
        return self.norm(self.conv(x)) * self.norm.num_features


class Branches(Types):
    def forward(self, x):
        x = self.norm(self.conv(x))
        return x if x.mean() > 100 else x + 1


FOLDED = {
    "3-D": lambda: nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU()),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose3d(2, 3, 2, stride=2), nn.BatchNorm3d(3), nn.ELU()
    ),
    "grouped": lambda: nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, groups=2, bias=False), nn.BatchNorm3d(4)
    ),
    "residual": Skip,
    "a branch on types": Types,
    "a branch on values": Guarded,
    "two names": Aliases,
}


@pytest.mark.parametrize("scale", [1, 200])
@pytest.mark.parametrize("name", FOLDED)
def test_the_answer_is_the_same_without_the_norms(name, scale):
    network = settled(FOLDED[name]())
    batch = torch.randn(2, 2, 4, 6, 8) * scale
    with torch.inference_mode():
        expected = network(batch)
        before = copy.deepcopy(network.state_dict())
        simpler = fold_batch_norm(network, (1, 2, 4, 6, 8), CPU)
        assert folded_norms(simpler) == norms(network)
        simpler.original = None  # which would be run where the other one does not fit
        kept = batch.clone()
        torch.testing.assert_close(simpler(batch), expected, rtol=1e-5, atol=1e-5 * scale)
        assert torch.equal(batch, kept), "an activation overwrote the network's input"
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())


def grouped_and_transposed():
    return nn.Sequential(nn.ConvTranspose3d(2, 4, 2, groups=2), nn.BatchNorm3d(4), nn.ReLU())


def hooked(method):
    """A layer with a hook, which folding would take away, or call with something else."""
    network = nn.Sequential(nn.Conv3d(2, 2, 1), nn.BatchNorm3d(2))
    getattr(network[1], method)(lambda *_: None)
    return network


class Unlike(Types):
    """A branch that tracing does not see, and that noise does not enter."""

    def __init__(self, branch):
        super().__init__()
        self.act = nn.ReLU()
        self.branch = branch

    def forward(self, x):
        if isinstance(x, torch.Tensor) and x.max() > 1.5:
            return self.branch(self, x.mul_(0.5))
        return self.act(self.norm(self.conv(x)))


class Labels(Types):
    """Answers that are no floats, or no tensor."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    "answer",
    [
        lambda y: y.argmax(1, keepdim=True),
        lambda y: y > 0,
        lambda y: (y.sigmoid() * 255).to(torch.uint8),
    ],
)
def test_answers_that_are_no_floats(answer):
    network = settled(Labels(answer))
    batch = torch.rand(2, 2, 4, 6, 8)
    with torch.inference_mode():
        simpler = fold_batch_norm(network, (1, 2, 4, 6, 8), CPU)
        assert folded_norms(simpler) == 1
        assert torch.equal(simpler(batch), network(batch))


@pytest.mark.parametrize("answer", [lambda y: (y, y), lambda y: {"a": y}, lambda y: None])
def test_answers_that_are_no_tensor_are_left_to_the_contract(answer):
    network = settled(Labels(answer))
    assert fold_batch_norm(network, (1, 2, 4, 6, 8), CPU) is network


def slanted(net, x):
    net.norm.eps = 2.0
    return net.norm(net.conv(x))


def swallowing(net, x):
    try:
        return net.conv(x) + 1
    except:  # noqa: E722
        return x


def both(net, x):
    y = net.norm(net.conv(x))
    return net.act(y) + y


@pytest.mark.parametrize(
    "branch",
    [
        lambda net, x: net.conv(x),
        lambda net, x: net.norm(x),
        lambda net, x: net.act(x) + x,
        lambda net, x: net.conv(x) + net.norm(net.conv(x)),
        lambda net, x: net.conv(x)[:, :, 1:],
        lambda net, x: torch.relu(net.conv(x)),
        lambda net, x: nn.functional.conv3d(x, net.conv.weight),
        lambda net, x: x if hasattr(net.conv, "weight") else x + 1,
        lambda net, x: x * getattr(net.norm, "num_features", 1),
        lambda net, x: x if any(isinstance(m, nn.BatchNorm3d) for m in net.modules()) else x + 1,
        lambda net, x: net.conv(x) if net.conv(x).shape[0] else x,
        lambda net, x: net.norm(net.conv(x)),
        lambda net, x: sum(len(list(m.buffers())) for m in net.modules()) + x,
        lambda net, x: x + sum(p.numel() for p in net.parameters()),
        lambda net, x: x + sum(isinstance(m, nn.BatchNorm3d) for m in net.children()),
        lambda net, x: x + sum(m.__class__ is nn.BatchNorm3d for m in net.children()),
        slanted,
        swallowing,
        both,
    ],
)
@pytest.mark.parametrize("run", [lambda network: network, run_by_onednn])
def test_branches_that_nothing_noticed_are_run_by_the_network_itself(branch, run):
    network = settled(Unlike(branch))
    batch = torch.rand(2, 2, 4, 6, 8) * 3
    with torch.inference_mode():
        expected = network(batch.clone())
        simpler = run(fold_batch_norm(network, (1, 2, 4, 6, 8), CPU))
        assert torch.equal(simpler(batch.clone()), expected)
        torch.testing.assert_close(simpler(batch / 3), network(batch / 3), rtol=1e-5, atol=1e-5)


def test_an_activation_that_a_list_holds_overwrites_nothing():
    class Held(Types):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()
            self.held = [self.conv, self.act]

        def forward(self, x):
            y = self.held[0](x)
            z = self.held[1](y)
            if isinstance(x, torch.Tensor) and x.max() > 1.5:
                z = z + y
            return self.norm(self.conv(x)) if isinstance(x, str) else z

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = FOLDED["3-D"]()
            self.second = Held()

        def forward(self, x):
            return self.second(self.first(x)[:, :2] + 2)

    network = settled(Two())
    batch = torch.rand(1, 2, 4, 6, 8)
    with torch.inference_mode():
        simpler = fold_batch_norm(network, (1, 2, 4, 6, 8), CPU)
        torch.testing.assert_close(simpler(batch), network(batch), rtol=1e-5, atol=1e-5)


def test_the_weights_that_stay_are_shared():
    network = settled(nn.Sequential(FOLDED["3-D"](), nn.Conv3d(3, 4, 3)))
    simpler = fold_batch_norm(network, (1, 2, 4, 6, 8), CPU)
    assert simpler.changed[1].weight is network[1].weight


@pytest.mark.parametrize(
    "make",
    [
        grouped_and_transposed,
        Shared,
        Branches,
        Reads,
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        lambda: nn.Sequential(nn.Conv3d(2, 2, 1), nn.ReLU()),
        lambda: nn.BatchNorm3d(2),
    ],
)
def test_what_cannot_be_folded_stays_as_it_is(make):
    network = settled(make())
    assert fold_batch_norm(network, (1, 2, 4, 6, 8), CPU) is network


def test_a_network_that_takes_no_such_batch_stays_as_it_is():
    network = settled(FOLDED["3-D"]())
    assert fold_batch_norm(network, (1, 7, 4, 6, 8), CPU) is network


def test_a_device_without_memory_for_the_trial_is_no_reason_to_compute_otherwise(monkeypatch):
    network = settled(FOLDED["3-D"]())

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    network[2].register_forward_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        fold_batch_norm(network, (1, 2, 4, 6, 8), CPU)


class Crowded(Skip):
    """Another thread runs another network while the code of this one is traced."""

    def __init__(self):
        super().__init__()
        self.meanwhile = []

    def forward(self, x):
        other = nn.Sequential(nn.Conv3d(1, 1, 1), nn.ReLU()).eval()

        def run():
            self.meanwhile.append(other(torch.ones(1, 1, 2, 2, 2)))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return super().forward(x)


def test_other_threads_run_networks_while_one_is_folded():
    network = settled(Crowded())
    folded = fold_batch_norm(network, (1, 2, 8, 8, 8), CPU)
    assert folded_norms(folded) == 2
    assert [type(each) for each in network.meanwhile] == [torch.Tensor]  # the trial's own


@pytest.mark.parametrize("place", ["conv", "norm"])
@pytest.mark.parametrize("method", ["forward", "_conv_forward"])
def test_layers_with_code_of_their_own_are_not_folded(place, method):
    network = settled(Types())
    layer = getattr(network, place)
    own = getattr(layer, method, layer.forward)
    setattr(layer, method, lambda *given: own(*given).clamp(max=20))
    assert fold_batch_norm(network, (1, 2, 4, 6, 8), CPU) is network


class Uncopied(Types):
    """It has the same layers when it is copied."""

    def __deepcopy__(self, memo):
        return copy.copy(self)


def test_a_network_that_shares_layers_with_its_copies_stays_as_it_is():
    network = settled(nn.Sequential(Uncopied()))
    batch = torch.rand(1, 2, 4, 6, 8)
    expected = network(batch)
    assert fold_batch_norm(network, batch.shape, CPU) is network
    assert torch.equal(network(batch), expected)


def test_nothing_is_folded_where_each_module_has_hooks():
    network = settled(Types())
    given = []
    hook = nn.modules.module.register_module_forward_hook(lambda *each: given.append(each))
    try:
        assert fold_batch_norm(network, (1, 2, 4, 6, 8), CPU) is network
    finally:
        hook.remove()
    assert not given


def test_norms_of_the_batch_are_not_folded():
    network = settled(
        nn.Sequential(nn.Conv3d(2, 2, 1), nn.BatchNorm3d(2, track_running_stats=False))
    )
    assert fold_batch_norm(network, (1, 2, 4, 6, 8), CPU) is network


def test_a_channel_is_not_lost_beside_one_of_large_values():
    class Beside(Types):
        def forward(self, x):
            y = self.norm(self.conv(x))
            extra = self.conv.bias.sum() if isinstance(x, torch.Tensor) else 0
            return torch.cat([y + extra, y * 1e6], 1)

    network = settled(Beside())
    assert fold_batch_norm(network, (1, 2, 4, 6, 8), CPU) is network
