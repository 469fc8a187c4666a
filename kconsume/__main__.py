"""`python -m kconsume`: the command line, where no `kconsume` program is on the path."""

from kconsume.cli import main

if __name__ == "__main__":
    main()
