"""A script without a guard, named as a reward."""

import sys

sys.exit(0)
