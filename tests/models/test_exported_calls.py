"""Programs of torch.export call operators directly, past the checks of modules."""

import operator

import pytest
import torch
import toy_networks
from helpers import job_values

from beam_inference.config.job_file import parse_job
from beam_inference.engines.loading import load_predictor
from beam_inference.models.exported_calls import check_calls, guard_calls
from beam_inference.models.exported_program import UnsafeProgram

pytestmark = pytest.mark.filterwarnings(
    # PyTorch's own, while it decomposes a program
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)

aten = torch.ops.aten
BATCH = torch.arange(2 * 4 * 3 * 3 * 3).reshape(2, 4, 3, 3, 3) / 100


class Calls(torch.nn.Module):
    """Calls an operator on its input and further tensors."""

    def __init__(self, operator, tensors, rest):
        super().__init__()
        self.operator = operator
        self.count = len(tensors)
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"tensor_{number}", tensor)
        self.rest = rest

    def forward(self, batch):
        tensors = [getattr(self, f"tensor_{number}") for number in range(self.count)]
        result = self.operator(batch, *tensors, *self.rest)
        return result[0] if isinstance(result, tuple) else result


def network_of(operator, tensors, rest, batch=BATCH, exported=None):
    """Export a sound call, and give it other tensors, as a file may state them."""
    program = torch.export.export(Calls(operator, exported or tensors, rest), (batch,))
    for number, tensor in enumerate(tensors):
        program.state_dict[f"tensor_{number}"] = tensor
    return guard_calls(program.module(check_guards=False))


def four(count):
    return [torch.full((count,), value) for value in (1.0, 0.5, 0.25, 2.0)]


NORM = (0.1, 1e-5)
BATCH_NORMS = [
    (aten._native_batch_norm_legit_no_training.default, NORM),
    (aten._native_batch_norm_legit.default, (False, *NORM)),
    (aten._native_batch_norm_legit.default, (True, *NORM)),
    (aten._native_batch_norm_legit_functional.default, (True, *NORM)),
    (aten._batch_norm_no_update.default, NORM),
    (aten._batch_norm_with_update_functional.default, NORM),
]


@pytest.mark.parametrize(("operator", "rest"), BATCH_NORMS)
def test_statistics_that_are_too_few(operator, rest):
    sound = network_of(operator, four(4), rest)
    torch.testing.assert_close(sound(BATCH), operator(BATCH, *four(4), *rest)[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match="batch_norm.* shapes do not fit"):
        network_of(operator, four(1), rest, exported=four(4))(BATCH)


def test_factors_of_weights_that_are_too_few():
    operator = aten._weight_norm_interface.default
    factors = torch.ones(2, 1, 1, 1, 1)
    sound = network_of(operator, [factors], (0,))
    torch.testing.assert_close(sound(BATCH), operator(BATCH, factors, 0)[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match="weight_norm.* shapes do not fit"):
        network_of(operator, [factors[:1]], (0,), exported=[factors])(BATCH)


def test_attention_to_fewer_batches():
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    queries = BATCH[..., 0].contiguous()
    others = [queries.clone(), queries.clone()]
    sound = network_of(operator, others, (), queries)
    expected = operator(queries, queries, queries)[0]
    torch.testing.assert_close(sound(queries), expected, rtol=0, atol=0)
    few = [other[:1] for other in others]
    with pytest.raises(ValueError, match="attention.* shapes do not fit"):
        network_of(operator, few, (), queries, others)(queries)
    with pytest.raises(ValueError, match="attention.* shapes do not fit"):
        sound(BATCH[..., 0])  # of which the kernel would take other numbers


@pytest.mark.parametrize(("shape", "fits"), [((3, 3), True), ((2, 1, 3, 1), True), ((2, 2), False)])
def test_masks_of_attention(shape, fits):
    batch = BATCH[..., 0].contiguous()
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default

    class Masked(torch.nn.Module):
        def forward(self, batch, mask):
            return operator(batch, batch, batch, attn_mask=mask)[0]

    program = torch.export.export(Masked(), (batch, torch.zeros(shape)))
    network = guard_calls(program.module(check_guards=False))
    if fits:
        torch.testing.assert_close(
            network(batch, torch.zeros(shape)), operator(batch, batch, batch)[0]
        )
    else:
        with pytest.raises(ValueError, match="attention.* shapes do not fit"):
            network(batch, torch.zeros(shape))


def test_memory_is_not_given_as_it_is():
    used = [torch.full((1 << 20,), 7.0) for _ in range(8)]
    del used
    network = network_of(lambda batch: batch.sum() + torch.empty(1 << 20), [], ())
    torch.testing.assert_close(network(BATCH), BATCH.sum().expand(1 << 20), rtol=0, atol=0)


def test_memory_is_not_given_as_it_is_in_a_tensor_that_is_there():
    class Empty(torch.nn.Module):
        def forward(self, batch):
            return batch.sum() + torch.empty(4)

    program = torch.export.export(Empty(), (BATCH,))
    check_calls(program)
    (made,) = (node for node in program.graph.nodes if node.target is aten.empty.memory_format)
    made.target = aten.empty.out
    with pytest.raises(UnsafeProgram, match="empty.out gives what the process has in its memory"):
        check_calls(program)


@pytest.mark.parametrize("operator", [aten.sum.default, aten._to_copy.default])
@pytest.mark.parametrize("within", [False, True])
def test_enumerations_that_are_numbers(operator, within):
    class Branch(torch.nn.Module):
        def forward(self, batch):
            def double(values):
                return operator(values, dtype=torch.float64)

            return (
                torch.cond(batch.sum() > 1, double, double, (batch,)) if within else double(batch)
            )

    program = torch.export.export(Branch(), (BATCH,))
    check_calls(program)
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    (call, *_) = [n for graph in graphs for n in graph.nodes if n.target == operator]
    call.kwargs = {**call.kwargs, "dtype": -1}
    with pytest.raises(UnsafeProgram, match=r"the number -1 as its dtype"):
        check_calls(program)


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [
        (operator.pow, 10**18, 10**18),
        (operator.mul, 10**30, 10**30),
        (operator.mul, [1], 10**9),
        (operator.mul, 10**9, "text"),
    ],
)
def test_integers_without_end(target, first, second):
    class Scaled(torch.nn.Module):
        def forward(self, batch):
            return batch * batch.shape[0]

    sizes = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(Scaled(), (BATCH,), dynamic_shapes=(sizes,))
    network = guard_calls(program.module(check_guards=False))
    torch.testing.assert_close(network(BATCH), BATCH * 2)
    network = program.module(check_guards=False)
    (output,) = network.graph.find_nodes(op="output")
    with network.graph.inserting_before(output):
        network.graph.call_function(target, (first, second))
    network.recompile()
    with pytest.raises(ValueError, match="no size of an array"):
        guard_calls(network)(BATCH)


def test_a_job_s_network_is_guarded(tmp_path):
    module = toy_networks.batch_norm().eval()
    program = torch.export.export(module, (torch.zeros(1, 1, 8, 8, 8),)).run_decompositions()
    names = [name for name in program.state_dict if name.endswith("running_var")]
    program.state_dict[names[0]] = torch.ones(1)
    torch.export.save(program, tmp_path / "net.pt2")
    model = {"path": str(tmp_path / "net.pt2"), "output_channels": 2}
    inference = {"engine": "torch", "device": "cpu", "batch_size": 1, "patch_shape": [8, 8, 8]}
    inference["patch_overlap"] = [0, 0, 0]
    job = parse_job(job_values("in", "out", model=model, inference=inference), tmp_path)
    predictor = load_predictor(job.model, job.inference)
    with predictor.device.session(), pytest.raises(ValueError, match="shapes do not fit"):
        predictor.predict(torch.zeros(1, 1, 8, 8, 8))
