"""The job's pipeline: one linear chain from runs to records to a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import apache_beam as beam

from beam_inference.state import LaunchSummary
from beam_inference.transforms import InferVolume
from beam_inference.worker import Launch, Record


def build(pipeline: beam.Pipeline, launch: Launch, workers: int = 1) -> None:
    """Apply a whole job to a pipeline; its last step writes the launch's summary into the state folder."""
    _ = (
        pipeline
        | "InferVolume" >> InferVolume(launch, workers)
        | "Outcomes" >> beam.Map(_outcome).with_output_types(str)
        | "Summarize" >> beam.CombineGlobally(CountOutcomes())
        | "WriteSummary" >> beam.Map(_write_summary, launch)
    )


class CountOutcomes(beam.CombineFn):
    """Records' outcomes, counted: elements strings, output a dict."""

    def create_accumulator(self) -> Counter[str]:
        """Nothing counted."""
        return Counter()

    def add_input(self, accumulator: Counter[str], outcome: str) -> Counter[str]:
        """One more of an outcome."""
        accumulator[outcome] += 1
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[Counter[str]]) -> Counter[str]:
        """The sum of counts."""
        return sum(accumulators, Counter())

    def extract_output(self, accumulator: Counter[str]) -> dict[str, int]:
        """Counts by outcome."""
        return dict(accumulator)


def _outcome(record: Record) -> str:
    return record.outcome


def _write_summary(counts: dict[str, int], launch: Launch) -> None:
    summary = LaunchSummary(
        done=counts.get("done", 0), skipped=counts.get("skipped", 0), quarantined=counts.get("quarantined", 0)
    )
    launch.state().write_summary(launch.id, summary)
