"""`dc-trl ablate` from a clone; dc_trl/command/ablate.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("ablate")


if __name__ == "__main__":
    main()
