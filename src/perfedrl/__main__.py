"""`python -m perfedrl` is the command `perfedrl`."""

from perfedrl.cli import main

if __name__ == "__main__":
    main()
