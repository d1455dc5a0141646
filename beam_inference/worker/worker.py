"""What one process does to a job's chunks, without Beam: the stages as plain methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from beam_inference.engines.predictor import Predictor
from beam_inference.job.messages import Launch, Record
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.worker.accumulator import BoundedChannels
from beam_inference.worker.chunk_inference import ChunkInference, NetworkFill
from beam_inference.worker.chunk_steps import ChunkSteps
from beam_inference.worker.crew import ClaimedStage, Crew
from beam_inference.worker.infer_stage import InferStage
from beam_inference.worker.merge_stage import MergeStage
from beam_inference.worker.open_job import OpenJob, ProcessNetwork, open_job
from beam_inference.worker.sum_stage import SumStage


def make_chunk_inference(opened: OpenJob) -> ChunkInference:
    """Make the inference of an opened job."""
    config = opened.job.config
    bounds = opened.job.sum_bounds
    assert bounds  # a job that began by older rules was refused at launch
    heads = [
        BoundedChannels(slice(channels.start, channels.stop), bound, largest)
        for channels, bound, largest in zip(
            config.model.channel_ranges, bounds, config.largest_predictions, strict=True
        )
    ]
    value = config.input.network_fill
    return ChunkInference(
        opened.predictor,
        opened.normalize,
        config.model.output_channels,
        opened.batch_size,
        max(bounds),
        heads=heads,
        window=config.inference.window,
        fill=None if value is None else NetworkFill(opened.job.input_bounds, value),
    )


class Worker:
    """Does chunks of one job; opens all that the job needs, once per process.

    The threads of a process share a worker and take turns on the device.

    Args:
        launch: the launch to work for, from :func:`beam_inference.prepare`.
        predictor: the network on its device; by default the job's network is loaded.
        network: the network of this process instead, which other jobs use, too.
        make_inference: makes what runs the network on chunks.

    Attributes:
        job: the resolved job.
        state: the job's state folder.

    Raises:
        WorkerFault: the output is gone; the network's files or its engine are not those of the
            launch.
        UserError: something of the job cannot be opened or loaded.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        predictor: Predictor | None = None,
        network: ProcessNetwork | None = None,
        make_inference: Callable[[OpenJob], ChunkInference] = make_chunk_inference,
    ) -> None:
        opened = open_job(launch, predictor, network)
        steps = ChunkSteps(opened, make_inference(opened))
        self.job: ResolvedJob = opened.job
        self.state: State = opened.state
        self._steps = steps
        length = launch.claim_length
        self._crew = None if length is None else Crew(opened, length, steps.should_stop, steps.pace)

    def _run(self, stage: ClaimedStage, indices: Sequence[int]) -> Iterator[Record]:
        """Do chunks of a stage; if this launch claims, what others have claimed is left to them."""
        with self._steps.pace.count_thread():
            yield from stage.run(indices) if self._crew is None else self._crew.do(stage, indices)

    @cached_property
    def _infer_stage(self) -> InferStage:
        return InferStage(self._steps)

    @cached_property
    def _sum_stage(self) -> SumStage:
        return SumStage(self._steps)

    @cached_property
    def _merge_stage(self) -> MergeStage:
        return MergeStage(self._steps)

    def infer_chunks(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do a run of chunks, each without its neighbours.

        Args:
            indices: the chunks.

        Yields:
            One record per chunk, once the chunk is durable.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        return self._run(self._infer_stage, indices)

    def sum_chunks(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do the first stage of ``strategy: exchange``: compute the patches that chunks own.

        Args:
            indices: the chunks.

        Yields:
            One record per chunk whose sums are needed.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        return self._run(self._sum_stage, indices)

    def waiting_chunks(self, indices: Sequence[int]) -> list[int]:
        """Return the chunks that have no receipt: the second stage finishes them."""
        return self._sum_stage.waiting_chunks(indices)

    def merge_seams(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do the second stage of ``strategy: exchange``: put chunks together, and write them.

        A chunk of which some sums do not exist is computed without its neighbours.

        Args:
            indices: the chunks.

        Yields:
            One record per chunk that is done or quarantined.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        return self._run(self._merge_stage, indices)
