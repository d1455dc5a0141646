"""The training loop: steps, validation, checkpoints, and how a training goes on after a kill.

Everything that a step does follows from the seed, the step's number and the state that a checkpoint
holds. So a training that is killed and run again makes, on one thread of a CPU, the same weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from beam_inference.config.fields import Json
from beam_inference.config.network import Network
from beam_inference.engines.partition.share import name_layers
from beam_inference.environment import format_bytes, usable_memory
from beam_inference.errors import (
    BeamInferenceError,
    ConfigError,
    StateError,
    VolumeError,
)
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.bounding_box import grown_shape
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.models.loading import load_network
from beam_inference.models.module_versions import copy_state
from beam_inference.training.checkpoint import (
    CHECKPOINT,
    Metrics,
    check_averaged,
    check_stream,
    describe_damage,
    find_not_finite,
    load_module,
    load_optimizer,
    load_scaler,
    read_checkpoint,
    read_metrics,
    read_step,
)
from beam_inference.training.config import TrainingConfig
from beam_inference.training.events import EVENTS, Events, open_events
from beam_inference.training.losses import Answers, compute_loss
from beam_inference.training.output_files import (
    Write,
    has_token,
    hold_folder,
    refuse_odd_names,
    replace_files,
)
from beam_inference.training.prediction import (
    PackedNetwork,
    Prediction,
    explain_network,
    predict,
    predict_part,
)
from beam_inference.training.ranks import Ranks, join_ranks, lost_ranks_told
from beam_inference.training.results import RESULTS, make_unet, source_sha256, write_results
from beam_inference.training.samples import Batch, SampleStream
from beam_inference.training.targets import Classes
from beam_inference.training.transforms import TrainingTransform

logger = logging.getLogger(__name__)

METRICS = "metrics.json"
_FILES = (CHECKPOINT, METRICS, *RESULTS)
"""Names of all files that a training writes into its folder."""
_MOST_UNKNOWN = 300
"""Samples from the first on of which nothing may be known."""
_MOST_CHANGE = 1e-3
"""Most that answers may differ, as a share of the largest, where a network is made anew."""


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training ended.

    Attributes:
        folder: where weights, page and job file are.
        metrics: its course, over all launches.
        steps_done: steps of this launch.
        waiting_share: share of this launch's time that was waited for samples.
    """

    folder: Path
    metrics: Metrics
    steps_done: int
    waiting_share: float


class TrainingDiverged(BeamInferenceError):
    """A loss, or a weight, is NaN or infinite."""


def train(config: TrainingConfig) -> TrainingOutcome:
    """Train a network, from the last checkpoint on if there is one.

    Under torchrun all ranks call this, and the first one writes.

    Raises:
        UserError: a volume, the network or a key is wrong, or the checkpoint is another training's.
        TrainingDiverged: the loss, or a weight, is no number any more.
        WorkerFault: a file cannot be written.
    """
    refuse_odd_names(Path(config.output), _FILES, [EVENTS])
    device = _device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with join_ranks(device, config.partition) as ranks:
        if device.type == "cuda":
            device = torch.device("cuda", ranks.local)
            torch.cuda.set_device(device)
        with lost_ranks_told():
            return _Trainer(config, ranks, device).run()


@dataclass(frozen=True)
class Trial:
    """Steps that are taken to find out what they need; nothing is kept of them.

    Attributes:
        device: where they are taken.
        take_step: takes a step of as many samples, of random voxels.
    """

    device: torch.device
    take_step: Callable[[int], None]


@contextlib.contextmanager
def try_steps(config: TrainingConfig) -> Iterator[Trial]:
    """Prepare steps of a training by one process, without its output folder.

    Raises:
        UserError: a volume, the network or a key is wrong, or processes would share patches.
    """
    if math.prod(config.partition) > 1:
        raise ConfigError(
            f"steps are tried by one process, and partition is {list(config.partition)}: each of "
            "its ranks takes a part of a step's memory. Set partition to [1, 1, 1] to find the "
            "batch of one process."
        )
    device = _device(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    alone = config.model_copy(update={"batch_size": 1})
    yield Trial(device, _Trainer(alone, Ranks(), device).try_step)


@dataclass(frozen=True)
class _Answered:
    """Samples of a step, and what the network answers: for each shape, as a batch has them."""

    groups: Sequence[Mapping[str, Tensor]]
    predictions: Sequence[Prediction]


@dataclass(frozen=True)
class _Validation:
    """The loss of a validation, and planes of its first sample by name.

    There is no loss where nothing is known of any sample.
    """

    loss: float | None
    planes: Json


class _Trainer:
    """One rank's part of a training."""

    def __init__(self, config: TrainingConfig, ranks: Ranks, device: torch.device) -> None:
        if ranks.mesh is not None and config.batch_size % ranks.teams:
            raise ConfigError(
                f"batch_size is {config.batch_size}, for {ranks.count} ranks, of which "
                f"{ranks.count // ranks.teams} share each sample; expected a multiple of "
                f"{ranks.teams}, since each step's samples are shared out evenly"
            )
        _check_memory_of_samples(config, ranks.teams)
        self._config = config
        self._ranks = ranks
        self._device = device
        self._folder = Path(config.output)
        self._stream = self._make_stream("train")
        has_validation = config.definite_split.validation > 0
        self._validation = self._make_stream("validation") if has_validation else None
        self._source_sha256 = source_sha256(config)
        self._network = _make_network(config, device)
        self._mesh = ranks.everybody if ranks.mesh is None else ranks.mesh
        name_layers(self._network, self._mesh)
        self._parallel: nn.Module = self._runnable(self._network)
        if ranks.count > 1:
            self._parallel = DistributedDataParallel(self._parallel)
        # such as a mask of minus infinity, which is no result of training
        self._constants = frozenset(find_not_finite(dict(self._network.named_buffers()), ""))
        self._average = None
        if config.ema is not None:
            average = get_ema_multi_avg_fn(config.ema)  # type: ignore[no-untyped-call]
            if self._constants:
                average = _keeping_infinite(average)
            self._average = AveragedModel(self._network, multi_avg_fn=average, use_buffers=True)
        self._optimizer = _make_optimizer(config, self._network)
        is_scaled = config.precision == "float16"
        self._scaler = torch.amp.GradScaler(device.type, enabled=is_scaled)
        self._metrics = Metrics()
        self._step = 0
        self._has_known = False
        self._is_compared = False

    def run(self) -> TrainingOutcome:
        """Take the steps that are left, and write the results."""
        token = uuid.uuid4().int if self._ranks.rank == 0 else 0
        holding = hold_folder(self._folder, str(token)) if token else contextlib.nullcontext()
        with holding:
            self._resume()
            self._check_all_resumed()
            self._check_shared(self._ranks.gather(token)[0])
            return self._train()

    def _train(self) -> TrainingOutcome:
        self._try_shapes()
        first = self._step
        waited = 0.0
        begun = time.monotonic()
        batches = self._stream.batches(self._config.workers)
        is_first = self._ranks.rank == 0
        with contextlib.closing(batches), open_events(self._folder, first, is_first) as events:
            while self._step < self._config.steps:
                asked = time.monotonic()
                batch = next(batches)
                waited += time.monotonic() - asked
                self._take_step(batch)
                self._note_step(batch, events)
        seconds = max(time.monotonic() - begun, 1e-9)
        example = self._example()
        if is_first:
            metrics = asdict(self._metrics)
            write_results(self._config, self._trained, self._source_sha256, metrics, example)
        return TrainingOutcome(self._folder, self._metrics, self._step - first, waited / seconds)

    def _check_all_resumed(self) -> None:
        """Compare from which step on each rank trains. All ranks must take part.

        Raises:
            ConfigError: they differ, as where each machine has a folder of its own.
        """
        steps = self._ranks.gather(self._step)
        if len(set(steps)) > 1:
            raise ConfigError(
                f"ranks would go on from unlike steps, {steps}, and mix their weights: not all of "
                f"them find the same {self._folder / CHECKPOINT}. output must be one folder that "
                "all machines share."
            )

    def _check_shared(self, token: int) -> None:
        """Refuse a folder of this rank's own.

        Args:
            token: the first rank's, with which it holds its folder.

        Raises:
            ConfigError: this rank does not find it.
        """
        if not has_token(self._folder, str(token)):
            raise ConfigError(
                f"rank {self._ranks.rank} does not find in {self._folder} what the first rank has "
                "written there: output must be one folder that all machines share"
            )

    def _try_shapes(self) -> None:
        """Run the network on all shapes of patches at once, so that a refusal comes first.

        All ranks must take part. Nothing is kept of it.
        """
        shapes = self._config.shapes_of_samples
        if len(shapes) == 1:
            return
        before = [(each, each.clone()) for each in self._network.buffers()]
        groups = [self._make_group(1, shape, is_known=False) for shape in shapes]
        with torch.no_grad():
            self._predict(self._runnable(self._network), groups, counts=True)
            for buffer, value in before:
                buffer.copy_(value)

    def try_step(self, samples: int) -> None:
        """Take a step of as many samples, of random voxels."""
        largest = max(self._config.shapes_of_samples, key=math.prod)
        self._take_step(Batch(0, [], [], [self._make_group(samples, largest, is_known=True)]))

    def _make_group(self, samples: int, patch: Zyx, *, is_known: bool) -> Mapping[str, Tensor]:
        """Samples of random voxels and an empty target."""
        config = self._config
        image = grown_shape(patch, config.network.crop_margin)
        channels = 1 if isinstance(config.target, Classes) else config.output_channels
        return {
            "image": torch.rand(samples, config.network.input_channels, *image),
            "target": torch.zeros(samples, channels, *patch),
            "known": torch.full((samples, channels, *patch), is_known),
        }

    def _runnable(self, network: nn.Module) -> nn.Module:
        """A network as predictions of this rank need it."""
        return PackedNetwork(network, self._mesh) if self._ranks.mesh is None else network

    @property
    def _trained(self) -> nn.Module:
        """The network whose weights are the result: the average, if there is one."""
        return self._network if self._average is None else self._average.module

    def _make_stream(self, subset: Any) -> SampleStream:
        config = self._config
        is_training = subset == "train"
        augmentation = config.augmentation if is_training else None
        return SampleStream(
            config.labelled_volumes,
            config.shapes_of_samples if is_training else config.patch_shape,
            crop_margin=config.network.crop_margin,
            batch_size=config.batch_size,
            split=config.definite_split,
            subset=subset,
            seed=config.seed,
            label_weights=config.label_weights,
            transform=TrainingTransform(config.target, config.normalize, augmentation),
            length=config.steps if is_training else config.validation_batches,
            rank=self._ranks.team,
            world_size=self._ranks.teams,
            cache_bytes=config.cache_bytes,
        )

    def _predict(
        self, network: nn.Module, groups: Sequence[Mapping[str, Tensor]], counts: bool
    ) -> list[Prediction]:
        precision = self._config.precision
        channels = self._config.output_channels
        images = [each["image"] for each in groups]
        patches = [each["target"].shape[2:] for each in groups]
        with torch.autocast(
            self._device.type, getattr(torch, precision), enabled=precision != "float32"
        ):
            mesh = self._ranks.mesh
            if mesh is None:
                return predict(network, images, patches, channels, self._device, counts)
            return [
                predict_part(network, image, patch, channels, mesh, self._device)
                for image, patch in zip(images, patches, strict=True)
            ]

    def _answer(self, network: nn.Module, batch: Batch) -> _Answered:
        """A network's answer to a batch. All ranks must take part, also those without a sample."""
        groups = batch.groups
        if not groups:  # the sample that others need this rank to compute counts nowhere
            groups = [self._make_group(1, self._config.patch_shape, is_known=False)]
        predictions = self._predict(network, groups, counts=bool(batch.groups))
        return _Answered(groups, predictions)

    def _part_of_loss(self, answered: _Answered) -> Tensor:
        answers = [
            Answers(
                each.logits,
                each.cut(group["target"]).to(self._device, non_blocking=True),
                each.cut(group["known"]).to(self._device, non_blocking=True),
            )
            for each, group in zip(answered.predictions, answered.groups, strict=True)
        ]
        return compute_loss(
            answers,
            self._config.loss,
            is_classes=isinstance(self._config.target, Classes),
            add_up=self._ranks.add_up,
            add_up_patch=self._ranks.add_up_patch,
        )

    def _take_step(self, batch: Batch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = _learning_rate(self._config, self._step)
        self._has_known = self._has_known or _has_known(batch)
        # What layers draw by lot, such as dropout, follows from step and rank: no state to keep.
        # Ranks that share samples draw the same.
        drawn = np.random.SeedSequence([self._config.seed, self._step, self._ranks.team])
        torch.manual_seed(int(drawn.generate_state(1)[0]))
        self._optimizer.zero_grad()
        answered = self._answer(self._parallel, batch)
        part = self._part_of_loss(answered)
        # Gradients are averaged over ranks, where the loss is a sum of their parts.
        with explain_network([each["image"].shape for each in answered.groups]):
            self._scaler.scale(part * self._ranks.count).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._average is not None:
            self._average.update_parameters(self._network)
        loss = float(self._ranks.add_up(part))
        self._check_loss(loss, f"step {self._step}")
        self._metrics.loss.append(loss)
        self._step += 1

    def _note_step(self, batch: Batch, events: Events) -> None:
        """Show and keep what a step of a batch has brought. All ranks must take part."""
        config = self._config
        is_last = self._step == config.steps
        rate = _learning_rate(config, self._step - 1)
        events.add_step(self._step, self._metrics.loss[-1], rate)
        is_judged = False
        if self._validation is not None and (is_last or self._step % config.validation_every == 0):
            judged = self._validate(self._validation)
            is_judged = judged.loss is not None
            self._note_validation(judged, events)
        if is_last or self._step % config.checkpoint_every == 0:
            self._check_known(is_last=is_last)
            if not is_judged:
                self._check_answer(batch)
            is_own = config.network.path is not None
            if is_own and (is_last or not self._is_compared):
                self._check_weights_are_all(batch)
            self._save()
        if self._ranks.rank == 0:
            _show_progress(self._step, config.steps, self._metrics)

    def _note_validation(self, judged: _Validation, events: Events) -> None:
        if judged.loss is None:
            if self._ranks.rank == 0:
                logger.warning(
                    "nothing is known of the %d samples of the validation after step %d: it has no "
                    "loss. Check target.unlabelled, target.count and the masks, or take more of "
                    "them (validation_batches, split.validation).",
                    self._config.validation_batches * self._config.batch_size,
                    self._step,
                )
            return
        self._check_loss(judged.loss, f"the validation after step {self._step}")
        self._metrics.validation.append((self._step, judged.loss))
        events.add_validation(self._step, judged.loss, judged.planes)

    def _check_answer(self, batch: Batch) -> None:
        """Refuse weights that answer with no numbers: a step's own loss is that before its update.

        All ranks must take part.
        """
        with torch.no_grad():
            answered = self._answer(self._runnable(self._trained.eval()), batch)
            loss = float(self._ranks.add_up(self._part_of_loss(answered)))
        self._network.train()
        self._check_loss(loss, f"the samples of step {self._step - 1}, after its update,")

    def _check_weights_are_all(self, batch: Batch) -> None:
        """Refuse a network that training changes beyond its weights, which are all that is kept.

        All ranks must take part.

        Raises:
            ConfigError: a network made anew answers otherwise with the same weights.
        """
        config = self._config
        path = config.network.path
        without = config.network.model_copy(update={"weights": None})
        anew = _make_network(config.model_copy(update={"network": without}), self._device)
        name_layers(anew, self._mesh)
        try:
            anew.load_state_dict(copy_state(self._trained.state_dict()))
        except Exception as error:  # of a module, which may read its own weights as it likes
            raise ConfigError(
                f"network.path {path}: the network that its factory makes anew does not take the "
                f"weights of the trained one: {describe_error(error)}. It must make the same "
                "network each time."
            ) from None
        answers = []
        with torch.no_grad():
            for network in (self._trained, anew):
                torch.manual_seed(config.seed)  # for what it may draw
                answers.append(self._answer(self._runnable(network.eval()), batch).predictions)
        self._network.train()
        largest, farthest = _distance(*answers)
        eps = torch.finfo(getattr(torch, config.precision)).eps
        differs = bool(batch.groups) and not farthest <= max(_MOST_CHANGE, 4 * eps) * largest
        found = torch.tensor(float(differs), device=self._device)
        if self._ranks.add_up(found) > 0:
            names = _unsaved_buffers(self._trained, anew)
            where = f" Not among its weights: {', '.join(names)}." if names else ""
            raise ConfigError(
                f"network.path {path}: after step {self._step}, the network that its factory makes "
                "anew answers otherwise than the trained one, with the same weights, by "
                f"{farthest:.2g} where answers reach {largest:.2g}: what a job runs would not be "
                f"what was trained.{where} Keep all that training changes as parameters, or as "
                "buffers (register_buffer with persistent=True), and let the factory make the same "
                "network each time."
            )
        self._is_compared = True

    def _check_loss(self, loss: float, of: str) -> None:
        if not math.isfinite(loss):
            raise self._diverged(f"the loss of {of} is {loss}")

    def _check_known(self, *, is_last: bool) -> None:
        """Refuse to go on where nothing was ever known. All ranks must take part.

        Raises:
            VolumeError: of many samples, or of all that there are, nothing is known.
        """
        if any(self._metrics.loss):
            return  # that of an earlier launch, too
        seen = torch.tensor(float(self._has_known), device=self._device)
        samples = self._step * self._config.batch_size
        if self._ranks.add_up(seen) > 0 or not (is_last or samples >= _MOST_UNKNOWN):
            return
        raise VolumeError(
            f"nothing is known of any of the {samples:,} samples of the first {self._step:,} "
            "steps, so the network has learnt nothing: by target.unlabelled, target.count and the "
            f"masks no voxel counts. Check these, and the labels, such as "
            f"{self._config.volumes[0].labels}; with label_weights boxes are sought where labels "
            "are."
        )

    def _validate(self, stream: SampleStream) -> _Validation:
        network = self._runnable(self._trained.eval())
        losses: list[float] = []
        planes: Json = {}
        has_known = False
        with torch.no_grad():
            for batch in _all_of(stream):
                has_known = has_known or _has_known(batch)
                answered = self._answer(network, batch)
                if not losses:
                    planes = self._planes(answered)
                losses.append(float(self._ranks.add_up(self._part_of_loss(answered))))
        self._network.train()
        known = self._ranks.add_up(torch.tensor(float(has_known), device=self._device))
        return _Validation(sum(losses) / len(losses) if known > 0 else None, planes)

    def _example(self) -> Json:
        """Planes of a sample, after the last step. All ranks must take part."""
        stream = self._stream if self._validation is None else self._validation
        with torch.no_grad():
            return self._planes(
                self._answer(self._runnable(self._trained.eval()), next(_all_of(stream)))
            )

    def _planes(self, answered: _Answered) -> Json:
        """Planes through the middle of the first sample: image, target, prediction.

        All ranks must take part. There are none on ranks that have only a part of the sample.
        """
        logits = answered.predictions[0].whole().float().cpu()
        is_sigmoid = self._config.activation == "sigmoid"
        predicted = logits.sigmoid() if is_sigmoid else logits.softmax(1)
        group = answered.groups[0]
        planes = {"image": group["image"], "target": group["target"], "prediction": predicted}
        if predicted.numel() == 0:
            return {}
        return {name: each[0, 0, each.shape[2] // 2].numpy() for name, each in planes.items()}

    def _state(self) -> Json:
        return {
            "config": self._config.model_dump(mode="json"),
            "source": self._source_sha256,
            "step": self._step,
            "stream": self._stream.state_dict(),
            "network": self._network.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "metrics": asdict(self._metrics),
        }

    def _save(self) -> None:
        """Keep where the training is, and what it has learnt, if that is of numbers.

        Raises:
            TrainingDiverged: a weight, or what the optimizer keeps of it, is NaN or infinite.
            WorkerFault: it cannot be written.
        """
        state = self._state()
        for key in ("network", "average", "optimizer"):
            for name in find_not_finite(state[key], key):
                if name.removeprefix("network.").removeprefix("average.module.") in self._constants:
                    continue
                raise self._diverged(
                    f"after step {self._step}, {name} holds NaN or infinite values"
                )
        if self._ranks.rank != 0:
            return
        metrics = json.dumps(asdict(self._metrics), allow_nan=False).encode()
        files: dict[str, Write] = {
            CHECKPOINT: partial(torch.save, state),
            METRICS: lambda draft: draft.write(metrics),
        }
        replace_files(self._folder, files)

    def _diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"{what}: expected numbers. Nothing is kept of it; the last checkpoint before, if "
            f"there was one, is in {self._folder}. Look for NaN and for huge values in "
            "the images (normalize), try a lower optimizer.learning_rate, or precision: float32."
        )

    def _resume(self) -> None:
        """Go on from a checkpoint, if there is one.

        Raises:
            StateError: it cannot be used.
        """
        path = self._folder / CHECKPOINT
        state = read_checkpoint(path, self._config, self._source_sha256)
        if state is None:
            return
        try:
            self._restore(state)
        except StateError as error:
            raise StateError(f"{path}: {error}") from None
        except Exception as error:
            raise describe_damage(path, error) from None

    def _restore(self, state: Json) -> None:
        """Take everything from a checkpoint, which need not be one that was written here."""
        step = read_step(state["step"], self._config.steps)
        self._stream.load_state_dict(state["stream"])
        check_stream(state["stream"], step)
        self._metrics = read_metrics(state["metrics"], step)
        load_module(self._network, state["network"], "network")
        if self._average is not None:
            load_module(self._average, state["average"], "average")
            check_averaged(state["average"], step)
        load_optimizer(
            self._optimizer, state["optimizer"], step, may_be_empty=self._scaler.is_enabled()
        )
        load_scaler(self._scaler, state["scaler"], step)
        self._step = step


def _check_memory_of_samples(config: TrainingConfig, teams: int) -> None:
    """Refuse steps whose samples alone take more memory than this machine has.

    Args:
        config: the training.
        teams: groups of ranks, among which a step's samples are shared out.

    Raises:
        ConfigError: they do.
    """
    patch = max(config.shapes_of_samples, key=math.prod)
    image = config.network.input_channels * math.prod(
        grown_shape(patch, config.network.crop_margin)
    )
    channels = 1 if isinstance(config.target, Classes) else config.output_channels
    # image and target in float32, and what is known of the target
    sample = 4 * image + 5 * channels * math.prod(patch)
    needed = ceil_div(config.batch_size, teams) * sample
    memory = usable_memory()
    if needed > memory:
        raise ConfigError(
            f"batch_size is {config.batch_size}: a step's samples take {format_bytes(needed)} of "
            f"each process, without what the network needs, and this machine has "
            f"{format_bytes(memory)}. Make batch_size or patch_shape smaller: train --fit-batch "
            "finds how many fit."
        )


def _make_network(config: TrainingConfig, device: torch.device) -> nn.Module:
    """The network that a training file names, on a device, ready to be trained.

    Raises:
        UserError: it cannot be made, or be trained.
    """
    path = config.network.path
    torch.manual_seed(config.seed)
    if path is None:
        network: object = make_unet(config)
    else:
        model = Network(
            path=path,
            weights=config.network.weights,
            input_channels=config.network.input_channels,
            output_channels=config.output_channels,
        )
        network = load_network(model).network
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"network.path {path}: the factory returned a {type(network).__name__}; "
            "only a torch.nn.Module can be trained"
        )
    _check_trainable(network, path)
    return network.to(device).train()


def _distance(
    predictions: Sequence[Prediction], others: Sequence[Prediction]
) -> tuple[float, float]:
    """The largest magnitude of a rank's predictions, and how far others are from them at most.

    It is NaN where either is.
    """
    found = [
        torch.stack([each.logits.abs().max(), (each.logits - other.logits).abs().max()])
        for each, other in zip(predictions, others, strict=True)
        if each.logits.numel()
    ]
    if not found:
        return 0.0, 0.0
    largest, farthest = torch.stack(found).amax(0).tolist()
    return largest, farthest


def _unsaved_buffers(network: nn.Module, anew: nn.Module) -> list[str]:
    """Names of buffers that are not saved, and that differ between two networks."""
    saved = network.state_dict()
    others = dict(anew.named_buffers())
    return [
        name
        for name, each in network.named_buffers()
        if name not in saved and not (name in others and torch.equal(each, others[name]))
    ]


def _has_known(batch: Batch) -> bool:
    """Whether a target counts anywhere in the samples of this rank."""
    return any(bool(group["known"].any()) for group in batch.groups)


def _all_of(stream: SampleStream) -> Iterator[Batch]:
    """The batches of a stream from its beginning, whatever was taken of it before."""
    stream.load_state_dict({**stream.state_dict(), "step": 0})
    return stream.batches()


def _device(config: TrainingConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but PyTorch finds no GPU here; write cpu or auto")
    has_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


_Tensors = tuple[Tensor, ...] | list[Tensor]


_Average = Callable[[_Tensors, _Tensors, Any], None]


def _keeping_infinite(average: _Average) -> _Average:
    """Keep infinite values that are equal already: of two, PyTorch's average is NaN."""

    def update(averages: _Tensors, values: _Tensors, count: Any) -> None:
        infinite = [n for n, value in enumerate(averages) if value.isinf().any()]
        kept = {n: averages[n].clone() for n in infinite}
        average(averages, values, count)
        for n, before in kept.items():
            averages[n].copy_(torch.where(before == values[n], before, averages[n]))

    return update


def _make_optimizer(config: TrainingConfig, network: nn.Module) -> torch.optim.Optimizer:
    wanted = config.optimizer
    parameters = [each for each in network.parameters() if each.requires_grad]
    if wanted.kind == "sgd":
        return torch.optim.SGD(
            parameters, wanted.learning_rate, wanted.momentum, weight_decay=wanted.weight_decay
        )
    return torch.optim.AdamW(parameters, wanted.learning_rate, weight_decay=wanted.weight_decay)


def _learning_rate(config: TrainingConfig, step: int) -> float:
    wanted = config.optimizer
    rate = wanted.learning_rate
    if step < wanted.warm_up:
        rate *= (step + 1) / (wanted.warm_up + 1)
    if wanted.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return rate


def _show_progress(step: int, steps: int, metrics: Metrics) -> None:
    """Rewrite a line of the terminal; elsewhere print a line now and then."""
    is_live = sys.stderr.isatty()
    if not is_live and step != steps and step % max(1, steps // 20):
        return
    recent: Sequence[float] = metrics.loss[-20:]
    text = f"step {step:,} of {steps:,}, loss {sum(recent) / len(recent):.4f}"
    if metrics.validation:
        text += f", validation {metrics.validation[-1][1]:.4f}"
    end = "\r" if is_live and step != steps else "\n"
    print(f"{text}  ", end=end, file=sys.stderr, flush=True)


def _check_trainable(network: nn.Module, path: str | None) -> None:
    """Refuse networks that cannot be trained, or whose weights could not be saved.

    Raises:
        ConfigError: it is one.
    """
    fault = None
    parameters = [*network.parameters()]
    if isinstance(network, torch.jit.ScriptModule):
        fault = "is TorchScript, which cannot be trained here: return the torch.nn.Module itself"
    elif any(is_lazy(each) or each.is_meta for each in (*parameters, *network.buffers())):
        fault = "has parameters without values: make all layers with their shapes, on the CPU"
    elif not any(each.requires_grad for each in parameters):
        fault = "has no parameter that is trained: leave requires_grad as it is for some"
    elif not all(isinstance(each, Tensor) for each in network.state_dict().values()):
        fault = (
            "saves more than tensors (get_extra_state), which a file of weights cannot hold: keep "
            "that as a buffer"
        )
    if fault is not None:
        raise ConfigError(f"network.path {path}: the factory's network {fault}")
