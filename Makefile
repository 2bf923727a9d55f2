# `make run` does the main job, `make test` the tests; both create .venv from the lock file first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: run test test-all test-federation coverage lint hooks docs-check format bench bench-federation bench-recovery bench-soak bench-gym bench-memory reproduce figures lock clean

run: $(STAMP)
	$(BIN)/perfedrl demo

# Every module and every claim at a small size, in a process per core; see CONTRIBUTING.md for how long each target takes.
test: $(STAMP)
	$(PYTEST) -n auto --dist worksteal --durations 15

# Everything: the larger sizes too, then the fleets of real processes, alone on the machine.
test-all: $(STAMP)
	$(PYTEST) -n auto --dist worksteal --durations 15 -m 'not network'
	$(PYTEST) -m network

# Fleets of real processes over TLS on the loopback device, and what happens when parts of them die or lie.
test-federation: $(STAMP)
	$(PYTEST) -m network

# The lines of src/ that `make test` runs; fails below the share in pyproject.toml.
coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n auto --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Runs what `make lint` runs before every commit.
hooks: $(STAMP)
	$(BIN)/pre-commit install

# Links, commands, make targets and paths that README, CONTRIBUTING, the pages in docs/ and the help texts name.
docs-check: $(STAMP)
	$(BIN)/python tests/docs/check_docs.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py

# Rounds over NVFlare and TLS beside the same averaging over bare sockets.
bench-federation: $(STAMP)
	$(BIN)/python benchmarks/bench_federation.py

# Seconds until training goes on after a kill of each process of a fleet.
bench-recovery: $(STAMP)
	$(BIN)/python benchmarks/bench_recovery.py

# Memory, threads and open files of a fleet's processes over 2,000 rounds with six agents.
bench-soak: $(STAMP)
	$(BIN)/python benchmarks/bench_soak.py

# Cart-poles in JAX, in Gymnasium, and in Gymnasium through the adapter; half-cheetahs on one core and on all.
bench-gym: $(STAMP)
	$(BIN)/python benchmarks/bench_gym.py
	$(BIN)/python benchmarks/bench_cheetahs.py

# The estimated memory of configs/ beside the compiler's count.
bench-memory: $(STAMP)
	$(BIN)/python benchmarks/bench_memory.py

reproduce: $(STAMP)
	$(BIN)/perfedrl reproduce all --json claims.json --report report.html

# All figures and the claims table from the committed runs in results/, without training.
figures: $(STAMP)
	$(BIN)/perfedrl reproduce all --runs results --saved --figures docs/figures --json results/claims.json
	$(BIN)/perfedrl reproduce families --runs results/families --saved --figures docs/figures \
		--json results/families/claims.json
	$(BIN)/perfedrl reproduce mechanisms --runs results/mechanisms --saved --figures docs/figures \
		--json results/mechanisms/claims.json
	$(BIN)/perfedrl reproduce machines --runs results/machines --saved --figures docs/figures \
		--json results/machines/claims.json
	$(BIN)/perfedrl compare configs/compare/*.toml --results results/compare --saved --figures docs/figures

# Rewrites the lock from pyproject.toml, for every Python and platform, without the address of any package host.
lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --universal --upgrade --generate-hashes --python-version 3.11 \
		--no-annotate --no-strip-extras --custom-compile-command "make lock" \
		--extra dev --extra federation --extra gym --extra mjx --extra mujoco pyproject.toml -o requirements.lock

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "perfedrl needs Python >= 3.11; set PYTHON=... to one"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
