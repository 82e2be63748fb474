# make check: before each commit, a minute on two cores. make quick: all tests that are not slow, five minutes.
PYTHON := $(or $(ASYNCRL_VENV),.venv)/bin/python

# The processes share the cores, and threads that wait for each other spin.
export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE # each process of the tests would compile everything anew

PYTEST := $(PYTHON) -m pytest -q -n 4 --dist loadgroup --no-loadscope-reorder \
  -m "not slow and not sglang and not gpu"

.PHONY: check format lint types imports rules quick
check: format lint
	$(MAKE) --no-print-directory -j 3 types imports rules # the first two take one core each

format:
	$(PYTHON) -m ruff format --check .
lint:
	$(PYTHON) -m ruff check .
types:
	$(PYTHON) -m mypy
imports:
	$(dir $(PYTHON))lint-imports
rules:
	$(PYTEST) tests/unit/policies tests/unit/messages tests/unit/config
quick:
	$(PYTEST)
