"""What PyTorch would make of a pickle beside plain values and stored tensors is refused."""

import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from beam_inference.models.pickle_bounds import NotFollowed, PickleOutOfBounds
from beam_inference.models.saved_pickles import check_saved


def saved(value, former=False):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not former)
    return file


class Called:
    """Is pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def archive_of(content):
    """An archive as torch.save writes it, whose pickle is given."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return file


def state_dict():
    network = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3), torch.nn.BatchNorm3d(2))
    network(torch.zeros(1, 1, 3, 3, 3).repeat(2, 1, 1, 1, 1))
    optimizer = torch.optim.AdamW(network.parameters())
    return {
        "weights": network.state_dict(),
        "parameters": dict(network.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "milestones": Counter({30: 1, 80: 1}),
        "sizes": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "layout": torch.strided,
        "kinds": {"a", 1, None},
        "bytes": b"\x80",
        "loss": np.float64(0.5),
        "step": np.int64(3),
        "small": torch.ones(3).to(torch.uint16),
        "view": torch.arange(9)[2:5],
        "pairs": OrderedDict([("a", 1)]),
        "ints": [1 << 200, -1],
        "of Python 2": Called(OrderedDict, [["weight", torch.ones(2)], ("bias", torch.ones(1))]),
    }


@pytest.mark.parametrize("former", [False, True])
def test_what_trainings_save_is_let_through(former):
    check_saved(saved(state_dict(), former))


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        Called(torch.FloatTensor, 1000),
        Called(torch.Tensor, 1000),
        Called(torch.UntypedStorage, 1000),
        Called(bytearray, 5 << 30),
        Called(torch._utils._rebuild_device_tensor_from_cpu_tensor, torch.ones(1), torch.float64),
        Called(complex, 1, 2),
        Called(pickle.loads, b""),
        torch.nn.Linear(1, 1),
    ],
    ids=["FloatTensor", "Tensor", "Storage", "bytes", "device", "complex", "code", "module"],
)
def test_what_makes_other_than_stored_tensors(value, former):
    with pytest.raises(NotFollowed, match="it calls"):
        check_saved(saved({"w": value}, former))


FILLED = (
    # what torch.Tensor() makes is given a storage of no bytes, and the shape [1000]
    b"ctorch\nTensor\n)R(ctorch.storage\nUntypedStorage\nK\x00\x85RK\x00M\xe8\x03\x85K\x01\x85tb."
)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"ctorch\nTensor\nM\xe8\x03\x85\x81.", "it calls new torch Tensor"),
        (FILLED, "it calls"),
        (b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.", "it changes what"),
        (b"}}X\x05\x00\x00\x00itemsNsb.", "it changes what a value"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00idna\x86R.", "than for bytes"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00a\x85R.", "than for bytes"),
    ],
    ids=["new", "filled", "methods", "plain", "codec", "no codec"],
)
def test_calls_that_pytorch_never_writes(content, told):
    with pytest.raises(NotFollowed, match=told):
        check_saved(archive_of(b"\x80\x02" + content))


COLLIDING = [n * ((1 << 61) - 1) for n in range(1, 4)]
"""Integers whose hashes are 0."""


@pytest.mark.parametrize(
    "value",
    [
        dict.fromkeys(COLLIDING),
        set(COLLIDING),
        Called(Counter, COLLIDING),
        Called(OrderedDict, [[key, 1] for key in COLLIDING]),
        Called(set, [(key,) for key in COLLIDING]),
    ],
    ids=["dict", "set", "counter", "ordered", "tuples"],
)
def test_keys_of_one_hash(value):
    with pytest.raises(PickleOutOfBounds, match="keys other than texts"):
        check_saved(saved(value))


def test_a_storage_that_is_not_listed_in_the_former_form():
    file = saved({"w": torch.ones(1000)}, former=True)
    file.seek(0)
    for _ in range(4):
        list(pickletools.genops(file))
    content = file.getvalue()[: file.tell()] + pickle.dumps([], protocol=2)
    with pytest.raises(PickleOutOfBounds, match="values are not in the file"):
        check_saved(io.BytesIO(content))


class Stored:
    """A storage of the former form, as a tensor refers to it."""

    def __init__(self, key, length, view=None, kind=torch.FloatStorage):
        self.said = ("storage", kind, key, "cpu", length, view)

    def tensor(self, *size, offset=0, stride=None):
        stride = tuple(1 for _ in size) if stride is None else stride
        arguments = (self, offset, size, stride, False, OrderedDict())
        return Called(torch._utils._rebuild_tensor_v2, *arguments)


def former_form(tensors, lengths):
    """A file in PyTorch's former form, of tensors and the lengths of its float32 storages."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    for _ in range(3):
        list(pickletools.genops(file))
    file.truncate()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.said if isinstance(value, Stored) else None

    Pickler(file, 2).dump(tensors)
    pickle.dump(list(lengths), file, 2)
    for length in lengths.values():
        file.write(struct.pack("<q", length) + bytes(4 * length))
    return file


def test_the_former_form_by_hand_is_what_pytorch_reads():
    a = Stored("a", 10)
    tensors = {"all": a.tensor(10), "part": a.tensor(2, offset=8), "none": a.tensor(0, offset=99)}
    file = former_form(tensors, {"a": 10})
    check_saved(file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["all"].tolist() == [0] * 10


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ([Stored("a", 0).tensor(0), Stored("a", 0).tensor(1000)], "more values"),
        ([Stored("a", 10).tensor(1000)], "more values"),
        ([Stored("a", 10).tensor(2, offset=9)], "more values"),
        ([Stored("a", 10).tensor(4, 3, stride=(3, 1))], "more values"),
        ([Stored("a", 10).tensor(2, stride=(-1,))], "shape that is none"),
        ([Stored("a", 10).tensor(-2)], "shape that is none"),
        ([Stored("a", 10).tensor(2), Stored("a", 20).tensor(20)], "two things of one storage"),
        (
            [Stored("a", 10).tensor(2), Stored("a", 10, kind=torch.DoubleStorage).tensor(9)],
            "two things of one storage",
        ),
        ([Stored("a", 10, view=("v", 0, 5)).tensor(5)], "no storage of a tensor"),
        ([Called(torch._utils._rebuild_tensor_v2, 1, 0, (1,), (1,), False, {})], "more values"),
    ],
    ids=[
        "empty",
        "longer",
        "offset",
        "strides",
        "backwards",
        "negative",
        "lengths",
        "kinds",
        "view",
        "number",
    ],
)
def test_tensors_beyond_their_storages_in_the_former_form(tensors, told):
    with pytest.raises(PickleOutOfBounds, match=told):
        check_saved(former_form(tensors, {"a": 10}))


def odd_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch will have no quantised tensors one day
        tagged = torch.nn.Parameter(torch.ones(1))
        tagged.tag = 1
        return {
            "a sparse tensor": torch.eye(2).to_sparse(),
            "sparse": torch.eye(2).to_sparse_csr(),
            "a quantised tensor": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "a nested tensor": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "without values": torch.ones(1, device="meta"),
            "attributes of its own": tagged,
        }


@pytest.mark.parametrize("told", odd_tensors())
def test_tensors_of_other_kinds_are_named(told):
    with pytest.raises(PickleOutOfBounds, match=f"it holds .*{told}.*dense tensors"):
        check_saved(saved({"w": odd_tensors()[told]}))


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02h\x07.", struct.pack("<q", 1)])
def test_what_is_no_pickle(content):
    with pytest.raises(NotFollowed):
        check_saved(io.BytesIO(content))
