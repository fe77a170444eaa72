"""`dc-trl doctor` from a clone; dc_trl/doctor/command.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("doctor")


if __name__ == "__main__":
    main()
