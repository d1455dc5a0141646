"""The job's pipeline: one linear chain from runs to records to a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import apache_beam as beam

from beam_inference.beam.cohort import InferVolumes
from beam_inference.beam.stages import DoStages
from beam_inference.beam.transforms import InferVolume
from beam_inference.errors import WorkerFault
from beam_inference.job.cohort import CohortLaunch
from beam_inference.job.messages import Launch, Record
from beam_inference.job.records import LaunchSummary
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords
from beam_inference.pyramid.pyramid import list_complete_scales, remove_scales


def build(
    pipeline: beam.Pipeline, launch: Launch, workers: int = 1, pyramids: Sequence[StageJob] = ()
) -> None:
    """Apply a whole job to a pipeline: its chunks, the launch's summary, and then its pyramids.

    The stages of a pyramid come after the summary, so that no runner begins them before all
    chunks are through. They do nothing where a chunk of the job has no receipt.

    Args:
        pipeline: the pipeline.
        launch: the launch.
        workers: worker processes that run at a time, as far as known.
        pyramids: the stages that make the pyramid of each output that is to have one.
    """
    summarized = (
        pipeline
        | "InferVolume" >> InferVolume(launch, workers)
        | "Outcomes" >> beam.Map(_outcome).with_output_types(str)
        | "Summarize" >> beam.CombineGlobally(CountOutcomes())
        | "WriteSummary" >> beam.Map(_write_summary, launch)
    )
    for number, pyramid in enumerate(pyramids, 1):
        nth = "" if number == 1 else str(number)
        left = beam.Map(_without_receipt, launch, pyramid).with_output_types(int)
        _ = (
            summarized
            | f"WithoutReceipt{nth}" >> left
            | f"Pyramid{nth}" >> DoStages(pyramid, workers)
            | f"ListScales{nth}" >> beam.Map(_list_scales, pyramid)
        )


def build_volumes(
    pipeline: beam.Pipeline,
    launch: CohortLaunch,
    exchanging: Mapping[str, bool],
    workers: int = 1,
) -> None:
    """Apply a job of several volumes to a pipeline: their chunks, then the summary of each.

    Args:
        pipeline: the pipeline.
        launch: the launch.
        exchanging: the volumes to do, by name, and whether by ``strategy: exchange``.
        workers: worker processes that run at a time, as far as known.
    """
    _ = (
        pipeline
        | "InferVolumes" >> InferVolumes(launch, exchanging, workers)
        | "CountOutcomes" >> beam.CombinePerKey(CountOutcomes())
        | "WriteSummaries" >> beam.Map(_write_summary_of_volume, launch)
    )


def _write_summary_of_volume(counted: tuple[str, dict[str, int]], launch: CohortLaunch) -> None:
    name, counts = counted
    launch.volume_state(name).write_summary(launch.id, _summary_of(counts))


class CountOutcomes(beam.CombineFn):
    """Counts outcomes of records: strings come in, a dict goes out."""

    def create_accumulator(self) -> Counter[str]:
        """Begin to count."""
        return Counter()

    def add_input(self, accumulator: Counter[str], outcome: str) -> Counter[str]:
        """Count one more outcome."""
        accumulator[outcome] += 1
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[Counter[str]]) -> Counter[str]:
        """Add up counts."""
        return sum(accumulators, Counter())

    def extract_output(self, accumulator: Counter[str]) -> dict[str, int]:
        """Return the counts, by outcome."""
        return dict(accumulator)


def _summary_of(counts: Mapping[str, int]) -> LaunchSummary:
    return LaunchSummary(
        done=counts.get("done", 0),
        skipped=counts.get("skipped", 0),
        quarantined=counts.get("quarantined", 0),
        summed=counts.get("summed", 0),
    )


def _outcome(record: Record) -> str:
    return record.outcome


def _write_summary(counts: dict[str, int], launch: Launch) -> LaunchSummary:
    """Write the summary of a launch, on a worker: a template has no launcher that could judge.

    Raises:
        WorkerFault: more chunks were quarantined than ``job.max_failed_chunks`` allows, so that the
            runner says failed.
    """
    summary = _summary_of(counts)
    job = launch.read_job()
    state = launch.state()
    state.write_summary(launch.id, summary)
    # Where there are no records, the file of an earlier launch is removed.
    state.write_quarantine_file(list(state.read_quarantined(0, job.plan.chunks.count)))
    if launch.shard is not None and not state.has_stop_request(launch.id):
        state.write_shard_end(launch.shard, launch.id)
    bound = job.config.job.max_failed_chunks
    if bound is not None and summary.quarantined > bound:
        raise WorkerFault(
            f"{summary.quarantined} chunks were quarantined, job.max_failed_chunks allows {bound}; "
            f"they are named in {state.url}/quarantine.jsonl"
        )
    return summary


def _without_receipt(summary: LaunchSummary, launch: Launch, pyramid: StageJob) -> int:
    """Count the chunks of the whole job that are not done, also those not to do by this launch.

    Scales that somebody has made meanwhile, with the command, are of the output as it was then:
    once no chunk is missing, they are removed.
    """
    count = launch.read_job().plan.chunks.count
    left = count - launch.state().count_receipts(0, count)
    if not left and summary.done and StageRecords(pyramid).chunk_counter()():
        _remove_early_scales(launch, pyramid)
    return left


def _remove_early_scales(launch: Launch, pyramid: StageJob) -> None:
    """Remove scales that were made before the last chunk; of launches of one job, one does it.

    The others may find scales that are made of what the output holds now: these stay.
    """
    crew = launch.state().crew()
    content = f"{pyramid.fingerprint[:16]}-{launch.state().hash_of_parts()}"
    if launch.claim_length is not None and not crew.begin_once(content):
        crew.wait_for_end(content, launch.read_job().config.job.timeouts.claim)
        return
    remove_scales(pyramid)
    StageRecords(pyramid).begin()
    if launch.claim_length is not None:
        crew.end_once(content)


def _list_scales(_: int, pyramid: StageJob) -> None:
    """Enter the scales that are complete into the output's metadata, which ends the pipeline.

    Raises:
        WorkerFault: some scales cannot be made, so that the runner says failed.
    """
    list_complete_scales(pyramid)
    causes = StageRecords(pyramid).failures()
    if causes and not pyramid.state().has_stop_request(pyramid.launch):
        raise WorkerFault(f"the pyramid cannot be made: {causes[0]}")
