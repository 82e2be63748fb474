"""A script without a main guard, named as a reward."""

import sys

sys.exit(0)
