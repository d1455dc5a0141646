"""``make bench-gpu`` on a stand-in for a GPU: every line of it, with tiny arrays."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.late_device import LateDevice, late

from beam_inference.engines import devices
from beam_inference.errors import DeviceOutOfMemory
from benchmarks import gpu
from benchmarks.gpu_table import tabulate

PATCH_SECONDS = 0.002
TINY = gpu.Scale(
    network="tiny",
    patch=(4, 8, 8),
    chunks=(1, 1, 2),
    copied=(24, 40, 40),
    kits_network="tiny",
    kits_patch=(8, 8, 8),
    kits_volumes=((16, 16, 16), (12, 12, 12), (8, 8, 8)),
    batches=(1, 2),
    repeats=2,
    trained=2,
    steps=(2, 4),
)


@pytest.fixture
def device():
    return LateDevice(bytes_per_second=1e6)


@pytest.fixture
def target(device):
    return gpu.Target(
        name="a late device",
        device="cpu",
        wrap=lambda predictor: late(predictor, device, PATCH_SECONDS),
        synchronize=device.synchronize,
        start_peak=device.start_peak,
        peak=lambda: device.peak,
        record=lambda action: action,
    )


def test_all_sections_are_measured_and_written(target, tmp_path):
    path = tmp_path / "gpu.json"
    results = gpu.measure(target, TINY, [2.0, 4.0], path)
    assert json.loads(path.read_text()) == results
    assert set(gpu.SECTIONS) < set(results)
    assert results["cut"] == results["failed"] == {}
    loop = results["loop / forward"]
    assert min(loop["seconds"], loop["against_seconds"]) >= loop["calls"] * PATCH_SECONDS
    whole = results["job"]
    assert whole["chunks"] == 2
    assert -0.05 < whole["idle share"] < 1
    assert whole["without a forward pass"] < 1
    assert whole["peak_bytes"] > 0
    assert whole["peak / projection"] == pytest.approx(
        whole["peak_bytes"] / whole["projected_bytes"], abs=1e-3
    )
    copies = results["copies"]
    assert 0 < copies["uploaded bytes per second"] < 1e6
    assert 0 < copies["downloaded bytes per second"] < 1e6
    # how much is hidden depends on what else this machine does: the formula has a test of its own
    assert "share of an upload that is hidden" in copies
    rows = results["batches and layouts"]["patches per second"]
    assert list(rows) == [
        f"{layout}, {n}" for layout in ("contiguous", "channels_last") for n in (1, 2)
    ]
    assert all(0 < rate < 1 / PATCH_SECONDS for rate in rows.values())
    precisions = results["precisions"]
    assert list(precisions) == ["float32", "bfloat16", "float16"]
    assert precisions["float32"]["root mean square difference"] == 0
    assert 0 < precisions["bfloat16"]["root mean square difference"] < 0.02
    rates = [f"patches per second, {n}{how}" for n in (1, 2) for how in ("", ", recorded")]
    for row in precisions.values():
        assert list(row) == ["root mean square difference", *rates]
        assert all(0 < row[rate] < 1 / PATCH_SECONDS for rate in rates)
    assert list(results["training"]) == [
        "samples of a step",
        "steps per second",  # of a difference of two times, which says nothing of so few steps
        "share of a step in which samples are waited for",
    ]
    for row in results["KiTS19-like"].values():
        assert row["volume"] == [16, 16, 16]
        assert row["calls"] == 27
        assert row["voxels per second"] < 16**3 / (27 * PATCH_SECONDS)
    prices = results["dollars per teravoxel"]
    assert prices["4 $/hour"]["job"] == pytest.approx(2 * prices["2 $/hour"]["job"], rel=1e-3)
    written = tabulate([results])
    assert "| KiTS19-like, float16, loop / forward |" in written
    assert "| dollars per teravoxel, 4 $/hour, KiTS19-like, float32 |" in written


def test_its_real_sizes_make_jobs(target):
    full = gpu.Bench(target, gpu.FULL, gpu.Budget(1.0))
    config = gpu.small_job(full, batch_size=max(gpu.FULL.batches), memory_format="channels_last")
    assert config.inference.patches_per_call == 16
    kits = gpu.job(full, "plain", (128, 128, 128), (64, 64, 64), (128, 128, 128))
    assert [gpu.chunk(None, kits, volume)[1] for volume in gpu.FULL.kits_volumes] == [27, 8, 1]
    assert sum(share for share, _ in gpu.SECTIONS.values()) > 1, "of what is left, not of all"
    assert gpu.BUDGET_SECONDS < 480


def test_a_teravoxel_costs_its_hours():
    assert gpu.dollars_per_teravoxel(1e12 / 3600, 3.0) == 3.0
    assert gpu.dollars_per_teravoxel(1e12 / 7200, 3.0) == 6.0


class Clock:
    """Goes on by some seconds whenever it is read."""

    def __init__(self, step):
        self.now = 0.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


def test_what_there_is_no_time_for_is_left_out_and_said(target, tmp_path):
    clock = Clock(0.02)
    results = gpu.measure(target, TINY, [], tmp_path / "gpu.json", seconds=0.5, clock=clock)
    assert results["job"]["chunks"] == 1
    assert "1 of 2 chunks" in results["cut"]["job"]
    assert any("repeats from" in what for what in results["cut"]["loop / forward"])
    assert "left out for want of time" in tabulate([results])


def test_without_any_time_nothing_is_measured(target, tmp_path):
    results = gpu.measure(target, TINY, [2.0], tmp_path / "gpu.json", seconds=0.0)
    assert results["cut"] == {name: ["all of it"] for name in gpu.SECTIONS}
    assert results["dollars per teravoxel"] == {"2 $/hour": {}}


def test_the_hidden_share_of_an_upload_is_what_forward_passes_do_not_wait_for(target, monkeypatch):
    seconds = {
        "uploads": 2.0,
        "downloads": 4.0,
        "forward passes": 0.5 * gpu.CALLS,
        "forward passes alone": 8.0,
        "forward passes and an upload": 8.5,
    }
    monkeypatch.setattr(gpu.Bench, "seconds", lambda self, action, what: seconds[what])
    size = 24 * 40 * 40
    assert gpu.measure_copies(bench(target, 10)) == {
        "bytes": size,
        "uploaded bytes per second": size / 2,
        "downloaded bytes per second": size / 4,
        "share of an upload that is hidden": 0.75,
    }


def test_copies_of_the_stand_in_wait_for_no_kernel_but_downloads_for_those_before(device):
    busy = threading.Event()
    kernels = device.kernels.after(busy.wait)
    arrived = device.begin_upload(np.ones((1, 2, 3, 4), np.uint8))
    device.up.last.result()
    assert arrived().sum() == 24
    download = device.download(torch.ones(5))
    assert not kernels.done()
    assert not device.down.last.done()
    busy.set()
    assert download().sum() == 5
    assert kernels.done()


def test_a_section_that_fails_is_told_and_the_others_are_measured(
    target, monkeypatch, tmp_path, capsys
):
    def measure_nothing(bench):
        raise RuntimeError("no kernel\nfor this")

    sections = {"broken": (0.5, measure_nothing), "loop / forward": (1.0, gpu.measure_loop)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    monkeypatch.setattr(gpu, "FULL", TINY)
    monkeypatch.setattr(gpu, "find_accelerator", lambda: "cuda")
    monkeypatch.setattr(gpu, "target_of", lambda device: target)
    with pytest.raises(SystemExit, match="failed: broken"):
        gpu.main([f"--output={tmp_path / 'gpu.json'}"])
    printed = capsys.readouterr().out
    assert "| broken, **failed** | RuntimeError: no kernel for this |" in printed
    assert "| loop / forward, ratio |" in printed


def bench(target, seconds):
    return gpu.Bench(target, TINY, gpu.Budget(seconds, clock=lambda: 0.0))


def test_the_largest_volume_is_taken_that_the_time_does_for(target):
    volumes = [
        gpu.measure_kits(bench(target, seconds))["float32"]["volume"] for seconds in (10, 0.1)
    ]
    assert volumes[0] == [16, 16, 16]
    assert volumes[1] != volumes[0]
    late = bench(target, -1)
    assert gpu.measure_kits(late) == gpu.measure_precisions(late) == {}
    assert gpu.measure_batches(late) == {"patches per second": {}}
    assert late.budget.cut[:2] == ["float32", "float16"]


def test_a_batch_that_is_too_large_ends_its_row(target, monkeypatch):
    measured = gpu.Bench.seconds

    def full(self, action, what):
        if what.endswith("2") or what.startswith("float16"):
            raise DeviceOutOfMemory("full")
        return measured(self, action, what)

    monkeypatch.setattr(gpu.Bench, "seconds", full)
    rows = gpu.measure_batches(bench(target, 10))["patches per second"]
    assert rows["contiguous, 2"] == rows["channels_last, 2"] == "out of memory"
    assert gpu.measure_kits(bench(target, 10))["float16"] == "out of memory"


def test_the_command_measures_the_accelerator_of_the_machine(target, monkeypatch, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "find_accelerator", lambda: None)
    with pytest.raises(SystemExit, match="sees no GPU"):
        gpu.main([])
    monkeypatch.setattr(gpu, "find_accelerator", lambda: "cuda")
    monkeypatch.setattr(gpu, "target_of", lambda device: target)
    gpu.main(["--seconds=0", "--dollars-per-hour", "1", "2.5", f"--output={path}"])
    assert "a late device" in capsys.readouterr().out
    assert set(json.loads(path.read_text())["dollars per teravoxel"]) == {"1 $/hour", "2.5 $/hour"}


def test_a_real_device_is_measured_through_pytorch(monkeypatch):
    called = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(get_device_name=lambda: "Sample")
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: called.append("waited"))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 5)
    target = gpu.target_of("cuda")
    target.synchronize()
    assert (target.name, target.start_peak(), target.peak()) == ("Sample", 3, 5)
    assert target.wrap(called) is called
    assert called == ["waited"]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert gpu.target_of("mps").name == "mps"
    assert devices.device_peak("mps") == 0


def test_on_cuda_tf32_is_measured_too(target, monkeypatch):
    """Here on the CPU, which would refuse it."""
    monkeypatch.setattr(gpu, "kind_of", lambda device: "cuda")
    asked = {}
    plain = gpu.small_job

    def small_job(bench, **inference):
        asked[inference.pop("precision")] = True
        return plain(bench, **inference)

    monkeypatch.setattr(gpu, "small_job", small_job)
    assert list(gpu.measure_precisions(bench(target, 10))) == [*asked]
    assert [*asked] == ["float32", "tf32", "bfloat16", "float16"]


def test_the_networks_answer_for_each_voxel():
    for name in ("residual", "tiny"):
        network = getattr(gpu_networks(), name)().eval()
        with torch.inference_mode():
            assert network(torch.zeros(1, 1, 4, 16, 16)).shape == (1, 3, 4, 16, 16)
    widths = [level[0].out_channels for level in gpu_networks().plain().down]
    assert widths == [64, 128, 256, 320]


def gpu_networks():
    from benchmarks import networks

    return networks


def test_cards_stand_side_by_side():
    old = {"job": {"voxels": 2}, "cut": {"copies": ["all", "of it"]}, "failed": {}, "seconds": 3}
    new = {"job": {"voxels": 4, "idle": 0.1}, "cut": {}, "seconds": 5}
    new["failed"] = {"copies": "no\nroom"}
    cards = [old, new]
    for name, card in zip("AB", cards, strict=True):
        card["machine"] = {"gpu": name, "torch": "2.11"}
    assert tabulate(cards).splitlines() == [
        "|  | A, torch 2.11 | B, torch 2.11 |",
        "| --- | --- | --- |",
        "| seconds that the measuring took | 3 | 5 |",
        "| job, voxels | 2 | 4 |",
        "| job, idle |  | 0.1 |",
        "| copies, **failed** |  | no room |",
        "| copies, left out for want of time | all; of it |  |",
    ]
