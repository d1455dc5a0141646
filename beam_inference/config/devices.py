"""Devices that a job may name: the CPU, and the accelerators of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import StringConstraints

DeviceKind = Literal["cpu", "cuda", "mps", "xpu"]
DeviceName = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d{1,3})?)$")]
"""``auto``, or a kind of device; of those that a machine may have several of, also its number."""

DefiniteDevice = Annotated[str, StringConstraints(pattern=r"^(cpu|mps|(cuda|xpu)(:\d{1,3})?)$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """What a kind of device can do, as far as a job depends on it.

    Attributes:
        title: the kind in words.
        copies_overlap: whether it has streams, so that copies are made while it computes. Without
            them arrays are brought when they are needed.
        reports_memory: whether PyTorch tells how much memory it has, and how much was in use.
        missing_dtypes: dtypes that its arrays cannot have.
    """

    title: str
    copies_overlap: bool = False
    reports_memory: bool = False
    missing_dtypes: tuple[str, ...] = ()


TRAITS: dict[DeviceKind, DeviceTraits] = {
    "cpu": DeviceTraits(title="the CPU"),
    "cuda": DeviceTraits(
        title="CUDA devices",
        copies_overlap=True,
        reports_memory=True,
    ),
    "mps": DeviceTraits(
        title="Apple's GPUs (mps)",
        missing_dtypes=("float64",),
    ),
    "xpu": DeviceTraits(
        title="Intel's GPUs (xpu)",
        copies_overlap=True,
        reports_memory=True,
    ),
}


def kind_of(device: str) -> DeviceKind:
    """The kind of a device, which a number may follow: "cuda" of "cuda:1".

    The number says where a job runs and changes none of its bits, so it is in no fingerprint.
    """
    name = device.partition(":")[0]
    return next(kind for kind in TRAITS if kind == name)


def titles(kinds: Sequence[DeviceKind]) -> str:
    """Kinds of devices in words: "the CPU or CUDA devices"."""
    return " or ".join(TRAITS[kind].title for kind in kinds)
