"""``python -m beam_inference``."""

import sys

from beam_inference.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
