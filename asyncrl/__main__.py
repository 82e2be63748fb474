"""``python -m asyncrl``: the same as the ``asyncrl`` command."""

from asyncrl.cli import main

if __name__ == "__main__":
    main()
