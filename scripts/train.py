"""Trains a policy with DC-GRPO.

    python scripts/train.py --config configs/quickstart.yaml [--any_field value ...]

Every field of the configuration file can be overridden on the command line; `--help` lists them all.
"""

import sys

from dc_trl.settings.command_line import leave_while_loading


def main() -> None:
    leave_while_loading()
    from dc_trl.training.command import train  # takes seconds

    outcome = train()
    if outcome is not None:
        sys.exit(outcome)


if __name__ == "__main__":
    main()
