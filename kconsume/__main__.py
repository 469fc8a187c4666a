"""Runs the command line as `python -m kconsume`, for example where the `kconsume` program is not on the PATH."""

from kconsume.cli import main

if __name__ == "__main__":
    main()
