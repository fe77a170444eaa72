"""Checks in minutes what this machine can do for dc_trl, and prints a block to paste into an issue; see --help."""

import sys

from dc_trl.doctor.command import main


if __name__ == "__main__":
    sys.exit(main())
