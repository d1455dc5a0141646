"""ONNX files are parsed as far as it takes to know that nothing of them is in other files."""

import numpy as np
import pytest

from beam_inference import predict
from beam_inference.errors import ModelContractError
from beam_inference.models.onnx_file import check_self_contained

onnx = pytest.importorskip("onnx")
EXTERNAL = "keeps its weights in another file"


def external_tensor():
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[1])
    tensor.external_data.add(key="location", value="w.bin")
    return tensor


def sparse_tensor():
    return onnx.SparseTensorProto(values=external_tensor(), dims=[1])


def graph_with(**parts):
    return onnx.GraphProto(name="g", **parts)


def node_with(**parts):
    return onnx.NodeProto(attribute=[onnx.AttributeProto(name="a", **parts)])


def nested(depth):
    graph = graph_with(initializer=[external_tensor()])
    for _ in range(depth):
        graph = graph_with(node=[node_with(g=graph)])
    return graph


MODELS = {
    "initializer": {"graph": graph_with(initializer=[external_tensor()])},
    "sparse initializer": {"graph": graph_with(sparse_initializer=[sparse_tensor()])},
    "indices": {
        "graph": graph_with(
            sparse_initializer=[onnx.SparseTensorProto(indices=external_tensor(), dims=[1])]
        )
    },
    "constant": {"graph": graph_with(node=[node_with(t=external_tensor())])},
    "constants": {"graph": graph_with(node=[node_with(tensors=[external_tensor()])])},
    "sparse constant": {"graph": graph_with(node=[node_with(sparse_tensor=sparse_tensor())])},
    "sparse constants": {"graph": graph_with(node=[node_with(sparse_tensors=[sparse_tensor()])])},
    "branch": {"graph": nested(3)},
    "branches": {"graph": graph_with(node=[node_with(graphs=[nested(0)])])},
    "function": {
        "graph": graph_with(),
        "functions": [onnx.FunctionProto(name="f", node=[node_with(t=external_tensor())])],
    },
    "default of a function": {
        "graph": graph_with(),
        "functions": [
            onnx.FunctionProto(attribute_proto=[onnx.AttributeProto(name="a", t=external_tensor())])
        ],
    },
    "training": {
        "graph": graph_with(),
        "training_info": [onnx.TrainingInfoProto(algorithm=nested(0))],
    },
}


def check(path, content):
    path.write_bytes(content)
    check_self_contained(path)


@pytest.mark.parametrize("name", MODELS)
def test_external_data_are_found_wherever_they_are(name, tmp_path):
    with pytest.raises(ModelContractError, match=EXTERNAL):
        check(tmp_path / "net.onnx", onnx.ModelProto(**MODELS[name]).SerializeToString())


def test_a_place_of_data_alone_is_enough(tmp_path):
    tensor = onnx.TensorProto(data_location=1)
    with pytest.raises(ModelContractError, match=EXTERNAL):
        check(
            tmp_path / "a.onnx",
            onnx.ModelProto(graph=graph_with(initializer=[tensor])).SerializeToString(),
        )
    tensor = onnx.TensorProto(data_location=0)
    check(
        tmp_path / "a.onnx",
        onnx.ModelProto(graph=graph_with(initializer=[tensor])).SerializeToString(),
    )


def test_names_of_the_words_are_not_mistaken_for_external_data(tmp_path):
    tensor = onnx.TensorProto(name="location", raw_data=b"\x0a\x08location\x12\x01w")
    check(
        tmp_path / "a.onnx",
        onnx.ModelProto(graph=graph_with(initializer=[tensor])).SerializeToString(),
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        b"<net/>",
        b"\n<net/>",
        b" <net/>",
        b"\t<net/>" + b" " * 10,
        b"\xef\xbb\xbf<net/>",
        b"\x08",  # a number without its value
        b"\x08" + b"\xff" * 10,  # that never ends
        b"\x3a\x7f",  # a graph that is longer than the file
        b"\x38\x01",  # a graph that is a number
        b"\x3b\x3c",  # a group
        b"\x02\x00",  # field 0
        b"\x08\x08",  # nothing but a version
        b"\x3a\x02\x0a\x05",  # a node that is longer than its graph
    ],
)
def test_what_is_no_onnx_file(content, tmp_path):
    with pytest.raises(ModelContractError, match="not an ONNX file|is empty"):
        check(tmp_path / "a.onnx", content)


def calls(number):
    """A file whose functions call the one before twice each; the first is an operator."""
    functions = [
        onnx.FunctionProto(
            name=f"f{k}",
            domain="own",
            node=[onnx.NodeProto(op_type=f"f{k - 1}" if k else "Relu", domain="own" if k else "")]
            * 2,
        )
        for k in range(number)
    ]
    top = onnx.NodeProto(op_type=f"f{number - 1}", domain="own")
    return onnx.ModelProto(graph=graph_with(node=[top]), functions=functions[::-1])


def test_functions_that_stand_for_many_nodes_are_refused(tmp_path):
    check(tmp_path / "a.onnx", calls(11).SerializeToString())
    for number in (14, 60):
        with pytest.raises(ModelContractError, match="stand for more than 10,000 nodes"):
            check(tmp_path / "a.onnx", calls(number).SerializeToString())


def test_functions_that_call_themselves_are_refused(tmp_path):
    model = calls(3)
    model.functions[-1].node[0].CopyFrom(onnx.NodeProto(op_type="f2", domain="own"))
    with pytest.raises(ModelContractError, match="call themselves"):
        check(tmp_path / "a.onnx", model.SerializeToString())


def branches(depth):
    """A file of graphs in branches of graphs."""
    graph = graph_with()
    for _ in range(depth):
        graph = graph_with(node=[node_with(g=graph)])
    return onnx.ModelProto(graph=graph).SerializeToString()


def test_branches_of_branches_are_refused_from_some_depth_on(tmp_path):
    check(tmp_path / "a.onnx", branches(13))
    with pytest.raises(ModelContractError, match="nested too deeply"):
        check(tmp_path / "a.onnx", branches(14))


def network_of(nodes, initializers=(), **parts):
    """An ONNX file of nodes that map x to y."""
    helper = onnx.helper
    shape = [1, 1, 2, 2, 2]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info("y", 1, shape)],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], **parts)


def within_branch(node):
    output = onnx.helper.make_empty_tensor_value_info("z")
    branch = onnx.helper.make_graph([node], "b", [], [output])
    return onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)


def check_model(model, tmp_path):
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    check_self_contained(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    "node",
    [
        onnx.helper.make_node("RandomUniformLike", ["x"], ["z"]),
        onnx.helper.make_node("Bernoulli", ["x"], ["z"], seed=1.0),
        onnx.helper.make_node("RandomNormal", [], ["z"], shape=[1], domain="ai.onnx"),
    ],
)
def test_random_numbers_are_refused_wherever_they_are_drawn(node, tmp_path):
    with pytest.raises(ModelContractError, match=f"by {node.op_type}.*evaluation mode"):
        check_model(network_of([node]), tmp_path)
    with pytest.raises(ModelContractError, match=f"by {node.op_type}.*evaluation mode"):
        check_model(network_of([within_branch(node)]), tmp_path)


def test_batch_normalisation_that_trains_is_refused(tmp_path):
    def norm(**attributes):
        inputs = ["x", "scale", "bias", "mean", "variance"]
        outputs = ["y", "m", "v"] if attributes.get("training_mode") else ["y"]
        return onnx.helper.make_node("BatchNormalization", inputs, outputs, **attributes)

    for sound in (norm(), norm(training_mode=0), norm(momentum=0.5)):
        check_model(network_of([sound]), tmp_path)
    given = norm()
    given.attribute.append(onnx.AttributeProto(name="training_mode", type=2, ref_attr_name="mode"))
    for node in (norm(training_mode=1), norm(momentum=0.5, training_mode=1), given):
        for nodes in ([node], [within_branch(node)]):
            with pytest.raises(ModelContractError, match="BatchNormalization in training mode"):
                check_model(network_of(nodes), tmp_path)


def test_a_field_that_is_there_twice_hides_nothing(tmp_path):
    """Protobuf takes the last one; here a text becomes a second name."""
    node = onnx.helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], zz=1)
    node.attribute[0].doc_string = "training_mode"
    content = network_of([node]).SerializeToString()
    content = content.replace(b"\x6a\x0dtraining_mode", b"\x0a\x0dtraining_mode")
    assert onnx.ModelProto.FromString(content).graph.node[0].attribute[0].name == "training_mode"
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(ModelContractError, match="BatchNormalization in training mode"):
        check_self_contained(tmp_path / "net.onnx")


def mode(*, value, raw=True):
    tensor = onnx.helper.make_tensor("mode", 9, [], [value])
    array = onnx.numpy_helper.to_array(tensor)
    return onnx.numpy_helper.from_array(array, "mode") if raw else tensor


@pytest.mark.parametrize("raw", [True, False])
def test_a_dropout_is_refused_unless_it_is_off(raw, tmp_path):
    dropout = onnx.helper.make_node("Dropout", ["x", "", "mode"], ["y"])
    check_model(network_of([onnx.helper.make_node("Dropout", ["x"], ["y"])]), tmp_path)
    check_model(network_of([dropout], [mode(value=False, raw=raw)]), tmp_path)
    constant = onnx.helper.make_node("Constant", [], ["mode"], value=mode(value=False, raw=raw))
    check_model(network_of([constant, dropout]), tmp_path)
    on = onnx.helper.make_node("Constant", [], ["mode"], value=mode(value=True, raw=raw))
    computed = onnx.helper.make_node("Not", ["other"], ["mode"])
    function = onnx.helper.make_function(
        "own", "F", ["x", "mode"], ["y"], [dropout], [onnx.helper.make_opsetid("", 17)]
    )
    for model in [
        network_of([dropout]),
        network_of([dropout], [mode(value=True, raw=raw)]),
        network_of([on, dropout]),
        network_of([computed, dropout]),
        network_of([constant, on, dropout]),
        network_of([constant], functions=[function]),
    ]:
        with pytest.raises(ModelContractError, match="a Dropout in training mode"):
            check_model(model, tmp_path)


@pytest.mark.parametrize("engine", [None, "onnxruntime"])
def test_a_prediction_refuses_what_jobs_refuse(engine, tmp_path):
    node = onnx.helper.make_node("RandomNormalLike", ["x"], ["y"])
    path = tmp_path / "net.onnx"
    path.write_bytes(network_of([node]).SerializeToString())
    array = np.zeros((2, 2, 2), np.float32)
    with pytest.raises(ModelContractError, match="by RandomNormalLike.*evaluation mode"):
        predict(array, str(path), engine=engine, device="cpu", output_channels=1)


def test_an_engine_that_does_not_read_a_file_is_told(tmp_path):
    path = tmp_path / "net.onnx"
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    path.write_bytes(network_of([node]).SerializeToString())
    array = np.zeros((2, 2, 2), np.float32)
    with pytest.raises(ModelContractError, match="choose an engine .* onnxruntime or openvino"):
        predict(array, str(path), device="cpu", output_channels=1)
