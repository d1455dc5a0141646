"""Disturb jobs for some time; ``make chaos SECONDS=3600 SEED=7``."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos.rounds import Case, Crew, Figures, Lost, Round, Workshop, draw_case
from chaos.subjects import write_inputs

DISTURBED_SECONDS = 40


def main() -> int:
    """Run rounds, and print their figures; 1 if anything was lost."""
    arguments = _parse_arguments()
    if _MARK not in os.environ:
        _begin_again_with_own_mounts()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    if not (folder / "inputs").exists():
        write_inputs(folder / "inputs", arguments.chunks)
    print(f"seed {seed}; what happens is told in {folder}/log", flush=True)
    if shutil.which("cc") is None:
        print("clocks do not jump: there is no compiler", flush=True)
    figures = Figures()
    start = time.monotonic()
    rounds = itertools.count() if arguments.round is None else [arguments.round]
    for number in rounds:
        if arguments.crew in (None, draw_case(seed, number).crew):
            _run_round(Workshop(folder), seed, number, arguments.disturbed, figures)
        if time.monotonic() - start >= arguments.seconds:
            break
    print_figures(figures, time.monotonic() - start)
    return 1 if figures.lost else 0


_MARK = "CHAOS_HAS_OWN_MOUNTS"
"""Variable that is set where mounts are seen by this process and its children only."""


def _begin_again_with_own_mounts() -> None:
    """Replace this process by one whose mounts go with it, however it ends; return if it cannot."""
    words = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") and not subprocess.run([*words, "true"], check=False).returncode:
        command = [*words, sys.executable, "-m", "chaos", *sys.argv[1:]]
        os.execvpe(words[0], command, {**os.environ, _MARK: "1"})


def _run_round(
    workshop: Workshop, seed: int, number: int, seconds: float, figures: Figures
) -> None:
    case: Case = draw_case(seed, number)
    begun = time.monotonic()
    try:
        Round(workshop, case, seed, number, seconds, figures).run()
        outcome = "held"
    except Lost as error:
        outcome = f"LOST: {error}; to repeat it: make chaos SEED={seed} ROUND={number}"
        figures.lost.append(f"{case.name}: {outcome}")
    took = time.monotonic() - begun
    print(f"round {number} ({case.name}), {took:.0f} s: {outcome}", flush=True)


def print_figures(figures: Figures, seconds: float) -> None:
    """Print what happened."""
    print(f"{sum(figures.rounds.values())} rounds held, {len(figures.lost)} lost, {seconds:.0f} s")
    for title in ("rounds", "misfortunes", "launches", "codes"):
        counts = getattr(figures, title)
        told = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
        print(f"{title} ({sum(counts.values())}): {told}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long rounds are begun")
    parser.add_argument("--seed", type=int, help="seed of all draws (default: a new one)")
    parser.add_argument("--round", type=int, help="only this round of the seed")
    parser.add_argument(
        "--disturbed",
        type=float,
        default=DISTURBED_SECONDS,
        help="seconds that a round is disturbed",
    )
    parser.add_argument("--crew", choices=list(Crew), help="only rounds of this crew")
    parser.add_argument("--chunks", type=int, default=960, help="of a job, at least")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
