"""`dc-trl calibrate` from a clone; dc_trl/command/calibrate.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("calibrate")


if __name__ == "__main__":
    main()
