"""What ``run``, ``plan``, ``status`` and ``verify`` do with a job file of several steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from beam_inference.cli.step_actions import JobAction, StepAction, open_steps
from beam_inference.cli.terminal import print_to_stderr
from beam_inference.config.cohort import Cohort
from beam_inference.config.fields import Json
from beam_inference.config.job import JobConfig
from beam_inference.config.steps import Steps, needed_steps
from beam_inference.errors import COMPLETE, FAILED, ConfigError, StateError, UserError

if TYPE_CHECKING:
    from beam_inference.cli.run import RunOptions
    from beam_inference.launch.step_progress import StepProgress


def run_steps(
    options: RunOptions,
    steps: Steps,
    run_job: Callable[[RunOptions, JobConfig | Cohort], int],
) -> int:
    """Do what is missing of each step, in order, up to the first that is not complete then.

    Args:
        options: of ``run``.
        steps: the steps.
        run_job: runs a job as the options say, and returns an exit code.

    Returns:
        The exit code of the last step begun.

    Raises:
        UserError: something is wrong with the steps, or with the one whose turn it is.
    """
    actions = open_steps(steps)
    names = list(actions) if options.step is None else [options.step]
    _check_options(options, actions)
    _check_runner(options, [actions[name] for name in names])
    if options.step is not None and isinstance(named := actions[options.step], JobAction):
        _check_later_steps(actions, options.step, anew=options.overwrite or options.redo)
        return run_job(options, options.choose_volume(named.job))
    codes: dict[str, Json] = {}
    exit_code = COMPLETE
    with print_to_stderr() if options.json else nullcontext():
        for number, name in enumerate(names, 1):
            action = actions[name]
            _check_later_steps(actions, name, anew=options.overwrite)
            print(f"step {name} ({number} of {len(names)}): {action.description}", flush=True)
            start = time.monotonic()
            own = replace(options, step=name, json=False)
            try:
                exit_code = (
                    run_job(own, own.choose_volume(action.job))
                    if isinstance(action, JobAction)
                    else action.run(own)
                )
            except UserError as error:
                raise type(error)(f"step {name}: {error}") from None
            codes[name] = {"exit_code": exit_code, "seconds": time.monotonic() - start}
            if exit_code != COMPLETE:
                break
    _print_outcome(options, names, codes, exit_code)
    return exit_code


def _print_outcome(
    options: RunOptions, names: list[str], codes: Mapping[str, Json], exit_code: int
) -> None:
    """Print how the steps went; the exit code says it even if nobody reads."""
    from beam_inference.cli.status_text import as_json

    with suppress(BrokenPipeError):
        if options.json:
            values = {
                "complete": exit_code == COMPLETE,
                "exit_code": exit_code,
                "steps": {name: codes.get(name) for name in names},
            }
            print(as_json(values))
        elif exit_code == COMPLETE:
            print(f"{len(names)} of {len(names)} steps complete")
        else:
            left = [name for name in names if name not in codes]
            after = f"; not begun: {', '.join(left)}" if left else ""
            print(
                f"step {list(codes)[-1]} is not complete{after}. To go on: "
                f"{options.command_to_continue}"
            )
        sys.stdout.flush()


def _check_options(options: RunOptions, actions: Mapping[str, StepAction]) -> None:
    """Refuse flags that are for one job, or for one step. Raises ConfigError."""
    of_job = {
        "--chunks": options.chunks,
        "--redo": options.redo,
        "--sample": options.sample is not None,
        "--shard": options.shard is not None,
        "--stop_after": options.stop_after is not None,
        "--volume": options.volume is not None,
    }
    given = [flag for flag, is_given in of_job.items() if is_given]
    if options.step is None:
        given += ["--overwrite"] * options.overwrite
        if given:
            raise ConfigError(
                f"{', '.join(given)} cannot be given for all steps of a job file: name one with "
                "--step"
            )
    elif given and not isinstance(actions[options.step], JobAction):
        raise ConfigError(
            f"{', '.join(given)} is for jobs, and the step {options.step} is the command "
            f"{actions[options.step].description}: leave it out"
        )


def _check_runner(options: RunOptions, actions: list[StepAction]) -> None:
    """Refuse a runner that cannot reach a place, or only stages. Raises ConfigError."""
    if not options.beam_flags:
        return
    from beam_inference.beam.flags import beam_options
    from beam_inference.beam.stage_runner import check_place
    from beam_inference.launch.run_job import template_of

    places = [action.places for action in actions]
    check_place(options.beam_flags, [url for each in places for url in each.read + each.written])
    if options.step is None and template_of(beam_options(options.beam_flags)):
        raise ConfigError(
            "a pipeline that is staged for another to run does one step, and each begins once "
            "those before it are judged complete: leave out --template_location or "
            "--output_executable_path, or name a step with --step"
        )


def _check_later_steps(actions: Mapping[str, StepAction], name: str, *, anew: bool) -> None:
    """Refuse to change what a later step has been made of.

    Args:
        actions: all steps.
        name: the step whose turn it is.
        anew: whether what it has done is done again.

    Raises:
        StateError: it would be changed.
    """
    for later in actions:
        if name not in _needed(actions, later) or not actions[later].has_begun():
            continue
        if anew or not actions[name].progress().is_complete:
            made = " and ".join(actions[later].places.written)
            raise StateError(
                f"the step {name} has something left to do, and the later step {later} has begun "
                f"with what {name} had made before: its result would be of both. Remove what it "
                f"has made ({made}), and give the command again"
            )
        return


def _needed(actions: Mapping[str, StepAction], name: str) -> list[str]:
    return needed_steps({each: action.places for each, action in actions.items()}, name)


def _progress(actions: Mapping[str, StepAction]) -> Iterator[tuple[str, StepProgress, str | None]]:
    """How far each step is, and the earlier one that it waits for, if there is one.

    A step that waits cannot be planned: what it reads may not be there.
    """
    from beam_inference.launch.step_progress import NOT_BEGUN

    incomplete: set[str] = set()
    for name, action in actions.items():
        waits_for = next((each for each in _needed(actions, name) if each in incomplete), None)
        progress = NOT_BEGUN if waits_for is not None else action.progress()
        if not progress.is_complete:
            incomplete.add(name)
        yield name, progress, waits_for


def print_steps_status(steps: Steps, step: str | None, *, as_json: bool) -> bool:
    """Print how far steps are.

    Args:
        steps: the steps.
        step: the one that is wanted; None for all.
        as_json: whether to print JSON.

    Returns:
        Whether nothing more is to come, as all are complete, or one waits for somebody.
    """
    from beam_inference.cli import status_text

    actions = open_steps(steps)
    found = [each for each in _progress(actions) if step in (None, each[0])]
    complete = sum(progress.is_complete for _, progress, _ in found)
    if as_json:
        values = {
            "complete": complete == len(found),
            "complete_steps": complete,
            "steps": {
                name: {
                    "step": actions[name].description,
                    "complete": progress.is_complete,
                    "chunks": progress.chunks,
                    "done": progress.done,
                    "quarantined": progress.quarantined,
                    "waits_for": waits_for,
                }
                for name, progress, waits_for in found
            },
        }
        print(status_text.as_json(values))
    else:
        for name, progress, waits_for in found:
            print(f"{name}: {_progress_text(progress, waits_for)}: {actions[name].description}")
        print(f"{complete} of {len(found)} steps complete")
    return complete == len(found) or any(progress.is_stuck for _, progress, _ in found)


def _progress_text(progress: StepProgress, waits_for: str | None) -> str:
    if waits_for is not None:
        return f"waits for {waits_for}"
    counts = "" if progress.chunks is None else f"{progress.done:,} of {progress.chunks:,} chunks"
    if progress.is_complete:
        return f"complete, {counts}" if counts else "complete"
    if not progress.done and not progress.quarantined:
        return "nothing done yet"
    quarantined = f", {progress.quarantined:,} quarantined" if progress.quarantined else ""
    return f"{counts} done{quarantined}"


def plan_steps(steps: Steps, step: str | None, *, as_json: bool) -> int:
    """Print the size of each step that can be planned by now.

    Args:
        steps: the steps.
        step: the one that is wanted; None for all.
        as_json: whether to print JSON.
    """
    from beam_inference.cli import status_text

    actions = open_steps(steps)
    found = [each for each in _progress(actions) if step in (None, each[0])]
    sizes = {
        name: None if waits_for is not None else _size(actions[name], progress)
        for name, progress, waits_for in found
    }
    if as_json:
        values = {
            name: {"step": actions[name].description, "waits_for": waits_for, "size": sizes[name]}
            for name, _, waits_for in found
        }
        print(status_text.as_json({"steps": values}))
        return COMPLETE
    for name, _, waits_for in found:
        size = sizes[name]
        known = f"is planned once {waits_for} is complete" if size is None else _size_text(size)
        print(f"{name}: {known}: {actions[name].description}")
    return COMPLETE


def _size(action: StepAction, progress: StepProgress) -> Json:
    """The size of a step as JSON values."""
    if not isinstance(action, JobAction):
        return {"chunks": progress.chunks}
    from beam_inference.cli.cohort_text import cohort_plan_values, size_values
    from beam_inference.launch.planned_cohort import PlannedVolume, plan_cohort
    from beam_inference.launch.planned_job import plan_job

    if isinstance(action.job, Cohort):
        return cohort_plan_values(plan_cohort(action.job))
    return size_values(PlannedVolume.of(plan_job(action.job)))


def _size_text(size: Json) -> str:
    if size["chunks"] is None:
        return "no chunks"
    calls = f", {size['network_calls']:,} patches" if "network_calls" in size else ""
    return f"{size['chunks']:,} chunks{calls}"


def verify_steps(steps: Steps, step: str | None, *, deep: bool, as_json: bool) -> int:
    """Check whether steps are complete, jobs by their receipts, and print what was found.

    What commands have made is not read back: their records hold no checksums of it.

    Args:
        steps: the steps.
        step: the one that is wanted; None for all.
        deep: whether to read every chunk of jobs back, and compare it with its receipt.
        as_json: whether to print JSON.
    """
    from beam_inference.cli import status_text

    actions = open_steps(steps)
    verified: dict[str, Json] = {}
    for name, progress, waits_for in _progress(actions):
        if step not in (None, name):
            continue
        action = actions[name]
        if isinstance(action, JobAction) and waits_for is None:
            verified[name] = _verify_job(action.job, deep=deep)
        else:
            verified[name] = {
                "complete": progress.is_complete,
                "deep": deep and isinstance(action, JobAction),
                "chunks": progress.chunks,
                "done": progress.done,
            }
    complete = sum(bool(values["complete"]) for values in verified.values())
    is_complete = complete == len(verified)
    with suppress(BrokenPipeError):
        if as_json:
            values = {"complete": is_complete, "deep": deep, "steps": verified}
            print(status_text.as_json(values))
        else:
            for name, each in verified.items():
                _print_verified(name, each, deep=deep)
            print(f"{complete} of {len(verified)} steps complete")
        sys.stdout.flush()
    return COMPLETE if is_complete else FAILED


def _print_verified(name: str, values: Json | None, *, deep: bool) -> None:
    """Print the result of the verification of a step, or of a volume of it.

    Args:
        name: the step's, or the volume's.
        values: the result; None if it was not launched.
        deep: whether chunks were asked to be read back.
    """
    from beam_inference.cli.status_text import print_some

    if values is None:
        print(f"{name}: not launched")
        return
    found = "complete" if values["complete"] else "not complete"
    if values["deep"] != deep:
        found += " by its records; what a command has made is not read back"
    print(f"{name}: {found}")
    for volume, each in values.get("volumes", {}).items():
        if each is None or not each["complete"]:
            _print_verified(f"{name}, volume {volume}", each, deep=deep)
    wrong = [f"volume {each}: {why}" for each, why in values.get("wrong_volumes", {}).items()]
    print_some("wrong", [*values.get("wrong", []), *wrong])
    print_some("missing", [f"chunk {chunk}" for chunk in values.get("first_missing", [])])
    quarantine = values.get("quarantine", [])
    faults = values.get("quarantined_volumes", {})
    print_some(
        "quarantined",
        [
            *(f"volume {each}: {why}" for each, why in faults.items()),
            *(f"chunk {each['chunk']}: {each['cause']}" for each in quarantine),
        ],
    )


def _verify_job(job: JobConfig | Cohort, *, deep: bool) -> Json:
    """Compare the receipts of a job with its plan; the result as JSON values."""
    from beam_inference.cli.cohort_text import cohort_verification_values
    from beam_inference.cli.status_text import verification_values
    from beam_inference.launch.launched_cohort import ask_volumes, read_volumes
    from beam_inference.launch.step_progress import find_launched_jobs

    if isinstance(job, Cohort):
        told = ask_volumes(read_volumes(job), lambda each: each.verify(deep=deep))
        return cohort_verification_values(told, deep=deep)
    (single,) = find_launched_jobs(job)
    if single is None:
        return {"complete": False, "deep": deep, "chunks": None, "done": 0}
    return verification_values(single.verify(deep=deep), single.pyramid_status(), deep=deep)
