"""The commands of training: ``split`` and ``train``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from beam_inference.cli.argument_types import natural, number_type, seed, shape
from beam_inference.cli.command import Options, Subparsers, add_command, add_debug, set_action
from beam_inference.environment import format_bytes
from beam_inference.errors import COMPLETE, ConfigError
from beam_inference.geometry.zyx import Zyx

if TYPE_CHECKING:
    from beam_inference.geometry.bounding_box import BoundingBox
    from beam_inference.training.config import TrainingConfig
    from beam_inference.training.split import Split

_MOST_LETTERS = (16, 64, 100)
"""Blocks along z, y, x that a map is drawn of."""

_share = number_type(float, lambda value: 0 <= value < 1, "a share from 0 to below 1")


@dataclass(frozen=True)
class SplitOptions(Options):
    """Options of ``split``."""

    volume: str
    scale: int
    patch_shape: Zyx | None
    block_shape: Zyx | None
    validation: float
    test: float
    seed: int
    name: str
    json: bool


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_split(subparsers)
    _add_train(subparsers)


def _add_split(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "split",
        "show which blocks of a volume are for training, validation and test",
        "em --patch-shape 16,64,64",
        "gs://bucket/em --block-shape 64,256,256 --validation 0.05 --json",
    )
    parser.add_argument("volume", metavar="VOLUME", help="path or URL of a volume")
    parser.add_argument(
        "--scale", type=natural, default=0, metavar="N", help="its scale (default: 0, the finest)"
    )
    _add_block_shape(parser)
    for subset in ("validation", "test"):
        parser.add_argument(
            f"--{subset}",
            type=_share,
            default=0.1,
            metavar="SHARE",
            help=f"share of blocks for {subset} (default: 0.1)",
        )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="another one gives another split"
    )
    parser.add_argument(
        "--name",
        default="",
        help="name of the volume's place; volumes of one place are split alike (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_debug(parser)
    set_action(parser, SplitOptions, split)


def _add_block_shape(parser: argparse.ArgumentParser) -> None:
    shapes = parser.add_mutually_exclusive_group(required=True)
    shapes.add_argument(
        "--patch_shape",
        "--patch-shape",
        type=shape,
        metavar="Z,Y,X",
        help="shape of patches; blocks are of four on each axis",
    )
    shapes.add_argument(
        "--block_shape", "--block-shape", type=shape, metavar="Z,Y,X", help="shape of blocks"
    )


def split(options: SplitOptions) -> int:
    """Print the size of each set and, of a small volume, a map of its blocks."""
    from beam_inference.training.split import Split, default_block_shape, subset_sizes
    from beam_inference.volumes.opening import open_volume

    block_shape = options.block_shape
    if block_shape is None:
        assert options.patch_shape is not None, "argparse requires one of the two"
        block_shape = default_block_shape([options.patch_shape])
    made = Split(block_shape, options.validation, options.test, options.seed)
    bounds = open_volume(options.volume, scale=options.scale).bounds
    if bounds.coarsen(block_shape).size > _MOST_BLOCKS:
        raise ConfigError(
            f"{options.volume} has {bounds.coarsen(block_shape).size:,} blocks of "
            f"{list(block_shape)} voxels; at most {_MOST_BLOCKS:,} are counted. Make blocks larger."
        )
    sizes = subset_sizes(made, bounds, options.name)
    if options.json:
        record = {"split": asdict(made), "name": options.name}
        record["sets"] = {subset: asdict(size) for subset, size in sizes.items()}
        print(json.dumps(record, indent=2))
        return COMPLETE
    print(f"{options.volume}: {bounds}, blocks of {list(block_shape)} voxels (z, y, x)")
    blocks = sum(size.blocks for size in sizes.values())
    for subset, size in sizes.items():
        share = size.blocks / blocks
        print(f"  {subset:<10} {size.blocks:>13,} blocks {share:>6.1%} {size.voxels:>22,} voxels")
    _print_map(made, bounds, options.name)
    return COMPLETE


_MOST_BLOCKS = 2**31


def _print_map(split: Split, bounds: BoundingBox, name: str) -> None:
    """Print a letter for each block, layer by layer, where that is few enough."""
    from beam_inference.training.split import SUBSETS

    blocks = bounds.coarsen(split.block_shape)
    if any(n > most for n, most in zip(blocks.shape, _MOST_LETTERS, strict=True)):
        return
    letters = [subset[0] if subset != "train" else "." for subset in SUBSETS]
    print("\n. train, v validation, t test; a letter for each block, lines along x")
    for z, layer in enumerate(split.subsets(blocks, name), blocks.start[0]):
        print(f"\nblocks that start at z = {z * split.block_shape[0]}")
        for row in layer:
            print("  " + "".join(letters[each] for each in row))


@dataclass(frozen=True)
class TrainOptions(Options):
    """Options of ``train``."""

    training: str
    fit_batch: bool


def _add_train(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        "train a network, and write a job file that runs it",
        "training.yaml",
        description=(
            "Train a network by a training file. Given again, the command goes on after the last "
            "checkpoint. With several processes: torchrun --nproc-per-node=N -m beam_inference "
            "train training.yaml"
        ),
    )
    parser.add_argument("training", metavar="TRAINING", help="the training file, YAML")
    parser.add_argument(
        "--fit-batch",
        "--fit_batch",
        action="store_true",
        help="find the samples that a step of one process can take, and train nothing",
    )
    add_debug(parser)
    set_action(parser, TrainOptions, train)


def train(options: TrainOptions) -> int:
    """Train, and print where the results are; or find the batch that fits."""
    from pathlib import Path

    from beam_inference.training.config import load_training
    from beam_inference.training.trainer import train as train_network

    config = load_training(Path(options.training))
    if options.fit_batch:
        return _fit_batch(config)
    outcome = train_network(config)
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            f"{len(outcome.metrics.loss):,} steps ({outcome.steps_done:,} by this launch), "
            f"{outcome.waiting_share:.1%} of the time waited for samples\n"
            f"complete: {outcome.folder}; next: beam-inference plan {outcome.folder / 'job.yaml'}"
        )
    return COMPLETE


def _fit_batch(config: TrainingConfig) -> int:
    from beam_inference.training.batch_fit import fit_batch

    fit = fit_batch(config)
    available = format_bytes(fit.available_bytes)
    if not fit.samples:
        raise ConfigError(
            f"not even one sample of {list(config.patch_shape)} voxels fits into {available}: make "
            "patch_shape smaller"
        )
    print(
        f"batch_size: {fit.samples} fits, for each process: a step of it takes "
        f"{format_bytes(fit.step_bytes)} of {available}"
    )
    return COMPLETE
