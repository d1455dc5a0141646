"""Test that commands start without the large libraries that they do not need."""

import subprocess
import sys
import warnings

import pytest
import torch

from beam_inference.cli.main import main
from beam_inference.engines.devices import may_have_accelerator

LARGE = ("torch", "apache_beam")


def large_libraries_after(*commands):
    """The large libraries that a process of its own imports for commands, and their exit codes."""
    code = (
        "import sys\n"
        "from beam_inference.cli.main import main\n"
        f"codes = [main(words) for words in {list(commands)}]\n"
        f"print('codes', *codes, *[name for name in {LARGE} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, codes = (line for line in done.stdout.splitlines() if line.startswith("codes"))
    words = codes.split()[1:]
    count = len(commands)
    return words[count:], [int(code) for code in words[:count]]


@pytest.fixture
def finished_job(job, tmp_path):
    """A job of a TorchScript network, with a pyramid, that is complete."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch means to give TorchScript up
        torch.jit.script(torch.nn.Conv3d(1, 1, 3, padding=1)).save(str(tmp_path / "network.pt"))
    path = job(
        model={"path": str(tmp_path / "network.pt"), "normalize": "unit"},
        inference={"device": "auto", "engine": "auto", "batch_size": 1},
        output={"pyramid": {}},
    )
    assert main(["run", path]) == 0
    return path


def test_looking_at_a_job_and_running_a_complete_one_need_neither_pytorch_nor_beam(finished_job):
    commands = (["run"], ["run", "--json"], ["status"], ["verify"], ["verify", "--deep"], ["clean"])
    imported, codes = large_libraries_after(*([*words, finished_job] for words in commands))
    assert imported == []
    assert codes == [0] * 6


@pytest.mark.skipif(may_have_accelerator(), reason="device: auto asks PyTorch for the CUDA device")
def test_a_plan_needs_neither_pytorch_nor_beam(finished_job):
    imported, codes = large_libraries_after(
        ["plan", finished_job], ["plan", finished_job, "--suggest"]
    )
    assert imported == []
    assert codes == [0, 0]


def test_a_mistaken_job_file_is_told_before_anything_large_is_imported(job, tmp_path):
    missing = str(tmp_path / "missing.yaml")
    wrong = job(inference={"patch_shape": [0, 1, 2]})
    commands = [[word, path] for word in ("run", "plan", "verify") for path in (missing, wrong)]
    imported, codes = large_libraries_after(*commands)
    assert imported == []
    assert set(codes) == {2}


def test_it_is_found_out_without_pytorch_whether_it_may_see_a_cuda_device():
    code = (
        "import sys; from beam_inference.engines.devices import may_have_accelerator; "
        "print(may_have_accelerator(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    may, imported = done.stdout.split()
    assert imported == "False"
    assert may == "True" or not torch.cuda.is_available()
