"""Run a job, for launchers that pass flags only: ``main.py --job=job.yaml [flags of run]``."""

import sys

from beam_inference.cli.main import run_with_flags

if __name__ == "__main__":
    sys.exit(run_with_flags())
