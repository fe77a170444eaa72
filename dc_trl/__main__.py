"""`python -m dc_trl`, which is `dc-trl` of this interpreter; `accelerate launch -m dc_trl train` starts it too."""

from .command import main


if __name__ == "__main__":
    main()
