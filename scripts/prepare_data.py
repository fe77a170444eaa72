"""`dc-trl prepare-data` from a clone; dc_trl/command/prepare_data.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("prepare-data")


if __name__ == "__main__":
    main()
