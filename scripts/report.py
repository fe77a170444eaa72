"""`dc-trl report` from a clone; dc_trl/command/report.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("report")


if __name__ == "__main__":
    main()
