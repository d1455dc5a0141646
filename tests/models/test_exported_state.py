"""Exported networks that keep something from one batch to the next are told from others."""

import pytest
import torch

from beam_inference.errors import ModelContractError
from beam_inference.models.exported_state import check_stateless

pytestmark = pytest.mark.filterwarnings(
    # PyTorch's own, while it decomposes a program
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)


class Stateful(torch.nn.Module):
    """A network with a buffer of which it makes some use."""

    def __init__(self, use):
        super().__init__()
        self.norm = torch.nn.BatchNorm3d(1)
        self.register_buffer("buffer", torch.zeros(2))
        self.use = use

    def forward(self, batch):
        return self.use(self, self.norm(batch))


def write_in_place(module, values):
    module.buffer.add_(1)
    return values + module.buffer[0]


def write_by_a_view(module, values):
    before = module.buffer[1] * 1
    module.buffer[1].view(1).copy_(values.mean().view(1))
    return values + before


def write_to_an_item(module, values):
    first, second = torch.unbind(module.buffer)
    first.add_(1)
    return values + second + first


def write_to_a_part(module, values):
    first, second = torch.split(module.buffer, 1)
    second.mul_(2).add_(1)
    return values + first + second


def write_anew(module, values):
    module.buffer = module.buffer * 2 + 1
    return values + module.buffer.sum()


def read(module, values):
    return (values + module.buffer[0].view(1)).add_(1)


def count_unread(module, values):
    module.buffer.add_(1)
    return values


def program_of(use, *, decomposed, training=False):
    module = Stateful(use).train(training)
    program = torch.export.export(module, (torch.zeros(2, 1, 4, 4, 4),))
    return program.run_decompositions({}) if decomposed else program


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    "use", [write_in_place, write_by_a_view, write_to_an_item, write_to_a_part, write_anew]
)
def test_state_that_is_read_is_refused(use, decomposed):
    with pytest.raises(ModelContractError, match="changes buffer with every batch"):
        check_stateless(program_of(use, decomposed=decomposed), "net.pt2")


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("use", [read, count_unread])
def test_what_does_not_reach_the_result_is_let_through(use, training, decomposed):
    check_stateless(program_of(use, decomposed=decomposed, training=training), "net.pt2")


def test_what_a_branch_changes_of_what_it_is_given_is_refused():
    """PyTorch exports no such branch; a file may hold one."""

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buffer", torch.zeros(2))

        def forward(self, batch):
            return torch.cond(
                batch.mean() > 0,
                lambda x, b: x + b.add(1)[0],
                lambda x, b: x * b[0],
                (batch, self.buffer),
            )

    program = torch.export.export(Branches(), (torch.zeros(2, 1, 4, 4, 4),))
    check_stateless(program, "net.pt2")
    aten = torch.ops.aten
    for module in program.graph_module.modules():
        for node in module.graph.nodes if module is not program.graph_module else ():
            if node.target is aten.add.Tensor and node.args[1] == 1:
                node.target = aten.add_.Tensor
    with pytest.raises(ModelContractError, match="changes what a branch or a loop of it is given"):
        check_stateless(program, "net.pt2")


def test_an_input_that_is_changed_is_refused():
    changing = torch.export.export(Changing(), (torch.zeros(2, 1, 4, 4, 4),))
    with pytest.raises(ModelContractError, match="with every batch"):
        check_stateless(changing.run_decompositions({}), "net.pt2")


class Changing(torch.nn.Module):
    """A network that changes its input."""

    def forward(self, batch):
        batch.add_(1)
        return batch * 2
