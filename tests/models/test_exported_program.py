"""Programs of torch.export are checked before PyTorch makes Python code of them."""

import copy
import json
import zipfile

import pytest
import torch
import toy_networks

from beam_inference.models.exported_program import (
    UnsafeProgram,
    check_example_inputs,
    check_program,
    parse_object,
)

pytestmark = pytest.mark.filterwarnings(
    # PyTorch's own, while it decomposes a program
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)


class Varied(torch.nn.Module):
    """A network with what networks have: constants, borders, sizes, a part without gradients."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, 4, 3, padding="same")
        self.norm = torch.nn.BatchNorm3d(4)
        self.constant = torch.ones(1)
        self.add_module("an-odd name", torch.nn.Conv3d(4, 2, 1))

    def forward(self, metadata):
        values = torch.nn.functional.max_pool3d(self.norm(self.conv(metadata)), 2)
        values = torch.nn.functional.interpolate(values, size=metadata.shape[2:])
        with torch.no_grad():
            values = values * self.constant
        values = torch.einsum("bczyx,c->bczyx", values, torch.arange(4).float())
        return getattr(self, "an-odd name")(values) / metadata.shape[0]


def program_of(module, folder, **options):
    path = folder / "net.pt2"
    example = (torch.zeros(2, 1, 4, 6, 8),)
    torch.export.save(torch.export.export(module.eval(), example, **options), path)
    with zipfile.ZipFile(path) as archive:
        return archive.read("net/models/model.json")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return json.loads(program_of(toy_networks.conv(), tmp_path_factory.mktemp("program")))


class Wide(torch.nn.Module):
    """A network of the layers for which torch.export writes operators of PyTorch's own."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.weight_norm(
            torch.nn.Conv3d(1, 4, 3, padding=1, padding_mode="circular")
        )
        self.norms = torch.nn.Sequential(
            torch.nn.InstanceNorm3d(4), torch.nn.GroupNorm(2, 4), torch.nn.BatchNorm3d(4)
        )
        self.attention = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.bilinear = torch.nn.Bilinear(4, 4, 4)

    def forward(self, batch):
        values = torch.nn.functional.prelu(self.norms(self.conv(batch)), torch.ones(1))
        values = torch.nn.functional.interpolate(values, scale_factor=2, mode="nearest-exact")
        values = torch.nn.functional.interpolate(values, scale_factor=0.5, mode="trilinear")
        values = torch.fft.irfftn(torch.fft.rfftn(values, dim=(3, 4)), dim=(3, 4))
        values = values.softmax(1) + values.log_softmax(1) + values.mean((2, 3, 4), keepdim=True)
        tokens = self.attention(values.flatten(2).transpose(1, 2))
        tokens = self.bilinear(tokens, tokens).transpose(1, 2).reshape(values.shape)
        return tokens.half().float()


@pytest.mark.parametrize("decomposed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_with_operators_of_pytorch_s_own(tmp_path, decomposed):
    program = torch.export.export(Wide().eval(), (torch.zeros(1, 1, 4, 6, 8),))
    program = program.run_decompositions() if decomposed else program
    torch.export.save(program, tmp_path / "net.pt2")
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        check_program(archive.read("net/models/model.json"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_sound_programs(tmp_path, dynamic):
    size = torch.export.Dim("batch", min=1, max=64)
    shapes = ({0: size, 2: torch.export.Dim.AUTO},) if dynamic else None
    content = program_of(Varied(), tmp_path, dynamic_shapes=shapes)
    check_program(content)
    assert (b"expr_str" in content) == dynamic


def put(value, at, what):
    """Put something into a copy of nested containers, at a place such as ``a.0.b``."""
    value = copy.deepcopy(value)
    inner = value
    *way, last = [int(key) if key.isdigit() else key for key in at.split(".")]
    for key in way:
        inner = inner[key]
    inner[last] = what
    return value


NODE = "graph_module.graph.nodes.0"
INPUT = "graph_module.graph.nodes.0.inputs.0"
CALL = "graph_module.module_call_graph.0.signature"
EVIL = "__import__('os').system('x')"
HOSTILE = [
    (f"{NODE}.target", "torch.os.system"),
    (f"{NODE}.target", "torch.hub.load"),
    (f"{NODE}.target", "torch.ops.load_library"),
    (f"{NODE}.target", "torch.ops.aten.from_file.default"),
    (f"{NODE}.target", "torch.ops.aten.save.default"),
    *(
        (f"{NODE}.target", f"torch.ops.aten.{name}")
        for name in [
            "_sparse_coo_tensor_unsafe.default",
            "_to_dense.default",
            "_reshape_alias.default",
            "_ctc_loss.default",
            "_unsafe_index_put.default",
            "_nested_view_from_buffer.default",
            "_make_per_tensor_quantized_tensor.default",
            "_empty_affine_quantized.default",
            "_efficientzerotensor.default",
            "_print.default",
            "ctc_loss.IntList",
            "max_pool3d_with_indices_backward.default",
            "resize_.default",
            "segment_reduce.default",
            "set_.source_Storage",
            "sparse_coo_tensor.size",
            "to_sparse.default",
            "values.default",
        ]
    ),
    ("graph_module.graph.tensor_values.input.layout", 1),
    (f"{INPUT}.arg", {"as_layout": 1}),
    ("guards_code", ["L['input'].size()[0] <= 4"] * 1001),
    pytest.param(
        "graph_module.graph.sym_int_values.a",
        [{"expr_str": "s0" + " + 1" * 20}] * 60_000,
        marks=pytest.mark.slow,
    ),
    (f"{NODE}.target", "torch.ops.aten.conv3d.__class__"),
    (f"{NODE}.target", "torch.ops.aten.__class__.default"),
    (f"{NODE}.target", "torch.ops.aten.conv3d.default.__class__"),
    (f"{NODE}.target", "torch.ops.higher_order.aoti_call_delegate"),
    (f"{NODE}.target", "torch.ops.higher_order.inline_asm_elementwise"),
    (f"{NODE}.target", "torch.ops.own.run.default"),
    (f"{NODE}.target", "_operator.methodcaller"),
    (f"{NODE}.target", "_operator.attrgetter"),
    (f"{NODE}.target", "math.__loader__.load_module"),
    (f"{NODE}.target", "#own:run"),
    (f"{NODE}.target", ["torch.os.system"]),
    (f"{NODE}.target", {"a": "torch.os.system"}),
    (f"{NODE}.name", "x\n    import os"),
    (f"{NODE}.name", "x); import os; ("),
    (f"{NODE}.metadata", {"as_operator": "torch.os.system"}),
    (f"{NODE}.metadata", {"custom": {"expr_str": EVIL}}),
    (f"{INPUT}.name", "x=import"),
    (f"{INPUT}.arg", {"as_operator": "torch.os.system"}),
    (f"{INPUT}.arg", {"as_custom_obj": {"name": "a", "class_fqn": "b"}}),
    (f"{INPUT}.arg", {"as_string_to_argument": {"metadata": {"as_operator": "torch.os.system"}}}),
    (f"{INPUT}.arg", {"as_string_to_argument": {"nodes": {"as_sym_int": {"as_name": "x;y"}}}}),
    ("graph_module.graph.inputs.0", {"as_string": "' or exec('1') or '"}),
    ("graph_module.graph.sym_int_values.a", {"as_expr": {"expr_str": EVIL}}),
    ("graph_module.graph.sym_int_values.metadata", {"as_expr": {"expr_str": EVIL}}),
    ("graph_module.graph.sym_int_values.nodes", {"as_expr": {"expr_str": [EVIL]}}),
    ("graph_module.graph.sym_int_values.nodes", {"as_expr": {"expr_str": {"a": "b"}}}),
    ("graph_module.graph.sym_int_values.tensor_values", {"as_expr": {"expr_str": EVIL}}),
    ("graph_module.graph.custom_obj_values.a", {"name": "a", "class_fqn": "b"}),
    ("graph_module.signature.input_specs.0", {"parameter": {"parameter_name": 'a"+evil+"'}}),
    ("guards_code", [EVIL]),
    ("guards_code", {"a": EVIL}),
    ("range_constraints.u99999999999", {"min_val": 0, "max_val": 1}),
    ("verifiers", ["a.b"]),
    ("unknown_key", "exec('1')"),
    ("graph_module.module_call_graph.0.fqn", "a'b"),
    (f"{CALL}.forward_arg_names", ["x=exec('1')"]),
    (f"{CALL}.in_spec", "no JSON"),
    (f"{CALL}.in_spec", "[1, 2]"),
    (f"{CALL}.in_spec", '[2, {"type": null, "context": null, "children_spec": []}]'),
    *(
        (f"{CALL}.out_spec", json.dumps([1, {"type": kind, "context": context, **children}]))
        for children in [{"children_spec": []}]
        for kind, context in [
            ("collections.defaultdict", '{"default_factory_module": "os"}'),
            ("builtins.dict", '[{"__enum__": true, "fqn": "antigravity:x", "name": "y"}]'),
            ("builtins.dict", '{"__enum__": true, "fqn": "antigravity:x", "name": "y"}'),
            ("builtins.dict", '["a=exec(1)"]'),
            ("own.Type", "null"),
        ]
    ),
]


@pytest.mark.parametrize(("at", "what"), HOSTILE)
def test_programs_that_could_run_code_are_refused(program, at, what):
    check_program(json.dumps(program).encode())
    with pytest.raises(UnsafeProgram):
        check_program(json.dumps(put(program, at, what)).encode())


def test_an_operator_that_believes_its_arguments_is_called_so(program):
    changed = put(program, f"{NODE}.target", "torch.ops.aten.lstm.input")
    with pytest.raises(UnsafeProgram, match="which PyTorch runs without comparing what it is giv"):
        check_program(json.dumps(changed).encode())


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b"{" * 10**5, b"[" * 10**5, b'{"a": ' + b"1" * 5000 + b"}"]
)
def test_what_is_no_json(content):
    with pytest.raises(ValueError):  # noqa: PT011  # by whichever part of the parser
        parse_object(content)


def test_json_without_bounds():
    with pytest.raises(ValueError, match="at most"):
        parse_object(b" " * (65 << 20))


def test_example_inputs():
    check_example_inputs(((torch.zeros(1), 1, None), {"x": [1.5]}))
    for value in ("text", {'a"+b+"': 1}, {1: 2}, [object()]):
        with pytest.raises(UnsafeProgram):
            check_example_inputs(value)
