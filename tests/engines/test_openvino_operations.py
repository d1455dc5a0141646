"""Operations that OpenVINO might not survive, or read other memory for, are refused."""

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
openvino = pytest.importorskip("openvino")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from openvino import opset13, opset16  # noqa: E402

from beam_inference.engines import openvino_operations  # noqa: E402
from beam_inference.engines.openvino import openvino_forward  # noqa: E402
from beam_inference.engines.openvino_operations import check_operations  # noqa: E402
from beam_inference.errors import EngineError  # noqa: E402

SHAPE = [1, 2, 4, 5, 6]
BEYOND_32_BITS = 2**37


def indices(*values):
    return opset13.constant(np.array(values, np.int64))


def gather_nd(array, index):
    return opset13.gather_nd(array, indices([0, 1, 2, 3, index], [0, 0, 0, 0, 0]))


def scatter(array, index):
    one = opset13.constant(np.ones([1] * 5, np.float32))
    return opset13.scatter_elements_update(
        array, opset13.constant(np.full([1] * 5, index, np.int64)), one, indices(-1)
    )


def normalise(array, axis):
    return opset13.mvn(array, indices(2, 3, axis), True, 1e-5, "INSIDE_SQRT")


def network_of(operation, index):
    array = opset13.parameter(SHAPE, np.float32)
    return openvino.Model([operation(array, index)], [array])


def in_branches(operation, index):
    """A network whose operation stands in a branch of an If."""
    array = opset13.parameter(SHAPE, np.float32)
    inner = [opset13.parameter(SHAPE, np.float32) for _ in range(2)]
    branches = [
        openvino.Model([operation(each, number)], [each])
        for each, number in zip(inner, (0, index), strict=True)
    ]
    choice = opset13.if_op(opset13.constant(np.array(True)))
    choice.set_then_body(branches[0])
    choice.set_else_body(branches[1])
    choice.set_input(array.output(0), *inner)
    result = choice.set_output(*(each.results[0] for each in branches))
    return openvino.Model([result], [array])


@pytest.mark.parametrize("build", [network_of, in_branches])
@pytest.mark.parametrize(
    ("operation", "index"),
    [
        (gather_nd, 6),
        (gather_nd, -1),
        (gather_nd, BEYOND_32_BITS + 4),
        (scatter, 6),
        (scatter, -7),
        (scatter, -(10**7)),
        (normalise, 5),
        (normalise, BEYOND_32_BITS + 4),
    ],
)
def test_indices_that_lead_out(build, operation, index):
    if operation is normalise and index == 5 and build is network_of:
        with pytest.raises(RuntimeError, match="rank"):  # OpenVINO does see this one
            openvino.Core().compile_model(network_of(operation, index), "CPU")
    with pytest.raises(EngineError, match=r"n\.xml has an operation .* outside of its array"):
        check_operations(build(operation, index), "n.xml")


@pytest.mark.parametrize("build", [network_of, in_branches])
@pytest.mark.parametrize(
    ("operation", "index"),
    [(gather_nd, 5), (scatter, 5), (scatter, -6), (normalise, 4), (normalise, -1)],
)
def test_indices_inside(build, operation, index):
    check_operations(build(operation, index), "n.xml")


def test_indices_that_are_computed_from_constants():
    def sum_of(array, index):
        return opset13.gather_nd(
            array, opset13.add(indices([0, 0, 0, 0, index]), indices([0, 1, 0, 0, 1]))
        )

    check_operations(network_of(sum_of, 4), "n.xml")
    with pytest.raises(EngineError, match="GatherND"):
        check_operations(network_of(sum_of, 5), "n.xml")


def regions(array, index):
    """A detector's, which takes its regions from any image of the batch."""
    places = opset13.constant(np.array([[index, 0, 0, 3, 3]], np.float32))
    image = opset13.reshape(array, indices(1, 8, 5, 6), False)
    return opset13.psroi_pooling(image, places, 2, 2, 1.0, 1, 1, "average")


def transform(array, size):
    pairs = opset13.reshape(array, indices(4, 5, 6, 2), False)
    return opset13.irdft(pairs, indices(0, 1), indices(size, 3))


@pytest.mark.parametrize(("operation", "number"), [(regions, -2), (regions, 0), (transform, 7)])
@pytest.mark.parametrize("build", [network_of, in_branches])
def test_operations_that_were_not_tried(build, operation, number):
    with pytest.raises(
        EngineError, match=r"n\.xml has an operation \w+, which OpenVINO does not run"
    ):
        check_operations(build(operation, number), "n.xml")


def pool(array, stride):
    return opset16.max_pool(
        array, [1, 1, stride], [1, 1, 1], [0, 0, 0], [0, 0, 0], [2, 2, 2]
    ).output(0)


def test_steps_beyond_32_bits():
    check_operations(network_of(pool, 2), "n.xml")
    with pytest.raises(EngineError, match="MaxPool with strides, dilations or a kernel below 1"):
        check_operations(network_of(pool, 2**40), "n.xml")


def split(array, length):
    return opset13.variadic_split(array, indices(-1), indices(length, -1)).output(0)


def pad(mode):
    def padded(array, number):
        begin = indices(0, 0, 0, 0, number)
        return opset13.pad(array, begin, indices(0, 0, 0, 0, 7), mode)

    return padded


def pad_less(mode):
    def padded(array, number):
        return opset13.pad(array, indices(0, 0, 0, 0, number), indices(0, 0, 0, 0, 1), mode)

    return padded


@pytest.mark.parametrize("build", [network_of, in_branches])
@pytest.mark.parametrize(
    ("operation", "number"),
    [(split, 9), (split, -2), (pad("edge"), -5), (pad("constant"), -6), (pad_less("reflect"), -1)],
)
def test_parts_and_pads_beyond_the_array(build, operation, number):
    with pytest.raises((EngineError, RuntimeError), match=r"outside of its array|Check "):
        check_operations(build(operation, number), "n.xml")


@pytest.mark.parametrize(
    ("operation", "number"),
    [(split, 4), (split, 6), (pad("edge"), 5), (pad("constant"), -3), (pad_less("reflect"), 5)],
)
def test_parts_and_pads_inside(operation, number):
    check_operations(network_of(operation, number), "n.xml")


def of_input(array):
    """A number that depends on the input."""
    return opset13.convert(opset13.reduce_max(array, indices(0, 1, 2, 3, 4), False), "i64")


def rows(array):
    return opset13.constant(np.ones([1, 2, 4, 5, 1], np.float32))


@pytest.mark.parametrize(
    "operation",
    [
        lambda array, at: opset13.roll(array, indices(1), at),
        lambda array, at: opset13.broadcast(
            opset13.reduce_sum(array, indices(0, 1, 2, 3), False), indices(6, 6), at, "EXPLICIT"
        ),
        lambda array, at: opset16.slice_scatter(array, rows(array), at, at, indices(1), indices(4)),
        lambda array, at: opset13.pad(array, at, at, "edge"),
        lambda array, at: opset13.slice(array, at, indices(6), indices(1), indices(4)),
        lambda array, at: opset13.gather(array, indices(0), at),
        lambda array, at: opset13.convert(opset13.non_zero(array), "f32"),
    ],
)
def test_what_is_told_by_the_input(operation):
    def build(array, _):
        return operation(array, opset13.broadcast(of_input(array), indices(1)))

    network = network_of(build, 0)
    with pytest.raises(EngineError, match=r"depend on the input|OpenVINO does not run here"):
        check_operations(network, "n.xml")


@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_that_leads_out_as_the_network_runs(threads, tmp_path, monkeypatch):
    """With one thread, what memory held was taken for the answer; such networks are refused now."""
    monkeypatch.setattr(openvino_operations, "_check_integers", lambda network, name: None)

    def look_up(array, _):
        index = opset13.convert(opset13.multiply(array, opset13.constant(np.float32(9))), "i64")
        return opset13.gather_elements(array, index, -1)

    openvino.save_model(network_of(look_up, 0), tmp_path / "n.xml")
    forward = openvino_forward(tmp_path / "n.xml", tuple(SHAPE), threads, tmp_path / "n.bin")
    inside = torch.full(SHAPE, 0.5)
    assert (forward(inside) == 0.5).all()
    with pytest.raises(RuntimeError, match="non-existing|indices"):
        forward(torch.ones(SHAPE))
    assert (forward(inside) == 0.5).all()


@pytest.mark.parametrize("operation", [gather_nd, scatter, normalise])
def test_indices_that_depend_on_the_input(operation):
    def of_input(array, _):
        index = opset13.convert(opset13.reduce_max(array, indices(0, 1, 2, 3, 4), False), "i64")
        if operation is gather_nd:
            return opset13.gather_nd(array, opset13.broadcast(index, indices(1, 5)))
        if operation is normalise:
            return opset13.mvn(
                array, opset13.broadcast(index, indices(1)), True, 1e-5, "INSIDE_SQRT"
            )
        one = opset13.constant(np.ones([1] * 5, np.float32))
        place = opset13.broadcast(index, indices(1, 1, 1, 1, 1))
        return opset13.scatter_elements_update(array, place, one, indices(-1))

    with pytest.raises(EngineError, match="or depend on the input"):
        check_operations(network_of(of_input, 0), "n.xml")


@pytest.mark.parametrize("axis", [1, 2, 4, -1, -3])
def test_axes_that_are_computed_from_the_shape(axis, tmp_path):
    """Those of LayerNormalization are all behind one."""
    names = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy"]
    scale = numpy_helper.from_array(np.full(SHAPE[axis:], 2, np.float32), "s")
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"], axis=axis)
    graph = helper.make_graph([node], "g", names[:1], names[1:], [scale])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "n.onnx",
    )
    example = torch.rand(SHAPE)
    forward = openvino_forward(tmp_path / "n.onnx", tuple(SHAPE), 1)
    expected = 2 * torch.nn.functional.layer_norm(example, SHAPE[axis:])
    torch.testing.assert_close(forward(example), expected)


class Corner(torch.nn.Module):
    """Adds the sum of three columns, of which two numbers are stated each."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + batch[:, :, torch.tensor([0, 1, 3]), torch.tensor([4, 0, 2])].sum()


@pytest.mark.filterwarnings("ignore")  # PyTorch's, as it exports
@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_sound_networks_that_gather(kind, tmp_path):
    example = torch.rand(SHAPE)
    source = network = Corner().eval()
    if kind == "onnx":
        source = tmp_path / "n.onnx"
        torch.onnx.export(network, (example,), source, dynamo=False)
    forward = openvino_forward(source, tuple(SHAPE), 1)
    torch.testing.assert_close(forward(example), network(example))


def test_a_file_of_which_the_engine_would_read_memory(tmp_path):
    openvino.save_model(network_of(gather_nd, 5000), tmp_path / "n.xml")
    with pytest.raises(EngineError, match="GatherND"):
        openvino_forward(tmp_path / "n.xml", tuple(SHAPE), 1, tmp_path / "n.bin")


def converted(array, kind):
    return opset13.convert(array, kind)


def best_of(array):
    """The channel with the largest value, at each voxel."""
    one = opset13.constant(np.int64(1))
    return opset13.topk(array, one, 1, "max", "none", "i64").output(1)


def table_of(rows):
    return opset13.constant(np.arange(rows, dtype=np.float32))


ONE = opset13.constant(np.float32(1))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            lambda x: converted(converted(x, "u8"), "f32"),
            "an operation Convert that computes in u8",
        ),
        (lambda x: converted(converted(x, "i32"), "f32"), "that computes in i32"),
        (
            lambda x: converted(opset13.add(best_of(x), indices(7)), "f32"),
            "an operation Add that computes in i64",
        ),
        (
            lambda x: converted(converted(best_of(x), "u8"), "f32"),
            "an operation Convert that computes in u8",
        ),
        (lambda x: opset13.gather(table_of(1), best_of(x), indices(0)), "Gather that may look for"),
        (
            lambda x: opset13.one_hot(best_of(x), opset13.constant(np.int64(1)), ONE, ONE, -1),
            "OneHot that may look for",
        ),
        (
            lambda x: opset13.gather_elements(
                opset13.slice(x, indices(0), indices(1), indices(1), indices(1)), best_of(x), 1
            ),
            "GatherElements that may look for",
        ),
        (
            lambda x: opset13.gather(
                table_of(1), converted(opset13.greater(x, table_of(1)), "i64"), indices(0)
            ),
            "Gather that may look for",
        ),
    ],
)
def test_integers_that_depend_on_the_input(operation, message):
    """They end elsewhere than in PyTorch, where values are larger than those that were tried."""
    network = network_of(lambda array, _: operation(array), 0)
    with pytest.raises(EngineError, match=message):
        check_operations(network, "n.xml")


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: converted(opset13.greater(x, table_of(1)), "f32"),
        lambda x: converted(converted(opset13.greater(x, table_of(1)), "i64"), "f32"),
        lambda x: converted(converted(best_of(x), "i32"), "f32"),
        lambda x: opset13.gather(table_of(2), best_of(x), indices(0)),
        lambda x: opset13.gather(table_of(3), opset13.squeeze(best_of(x), indices(1)), indices(0)),
        lambda x: opset13.gather_elements(x, best_of(x), 1),
        lambda x: opset13.max_pool(x, [2] * 3, [1] * 3, [0] * 3, [0] * 3, [2] * 3).output(0),
        lambda x: opset13.reshape(x, opset13.shape_of(x), False),
    ],
)
def test_integers_that_number_places_or_tell_truths_are_taken(operation):
    check_operations(network_of(lambda array, _: operation(array), 0), "n.xml")
