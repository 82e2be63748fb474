"""``python -m asyncrl``: the same as the ``asyncrl`` command."""

import os
import sys

if not sys.flags.safe_path:  # Python has put the working directory first; a user's http.py must not replace Python's
    sys.path.append(sys.path.pop(0) or os.getcwd())

from asyncrl.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
