# make check: everything that should hold before a commit. Two minutes are the goal; two slow cores take five.
PYTHON := $(or $(ASYNCRL_VENV),.venv)/bin/python

# The processes share the cores, and threads that wait for each other spin.
export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE # each process of the tests would compile everything anew

.PHONY: check format lint types imports quick
check: format lint
	$(MAKE) --no-print-directory -j 3 types imports quick # the first two take one core each

format:
	$(PYTHON) -m ruff format --check .
lint:
	$(PYTHON) -m ruff check .
types:
	$(PYTHON) -m mypy
imports:
	$(dir $(PYTHON))lint-imports
	$(PYTHON) bin/count-imports
quick:
	$(PYTHON) -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder --hypothesis-profile quick \
	  -m "not slow and not sglang and not gpu"
