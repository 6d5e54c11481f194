# `make` lists the targets. Everything is installed into .venv, nothing elsewhere.
#
#   make demo PYTHON=python3.12          # the Python that .venv is made with
#   make test PYTEST_FLAGS='-k staleness'
#   make test TEST_PROCESSES=0           # all in one process; default: the files in three, side by side
#   make test FULL=1                     # all combinations of what the tests check, too
#   make cc-test FULL=1                  # longer simulations; see scripts/cc_test.sh

PYTHON ?= python3
PYTEST_FLAGS ?=
# More than two cores: tests on servers wait, too. With more of them, all only take longer.
TEST_PROCESSES ?= 3
# A process that ends within a test is not replaced: another one would run that test again.
SIDE_BY_SIDE = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# Of make soak: how often it runs the tests that are about servers which fail.
SOAK_ROUNDS ?= 10
SOAK_FILES := $(wildcard $(addprefix tests/test_,$(addsuffix .py,*_failures lost_between_epochs \
  broken_connections silent_servers transport readers hop_retries cluster)))
# Of make fuzz: --calls, --seed and more; scripts/fuzz_ops.py says which.
FUZZ_FLAGS ?= --minutes=5
FULL ?= 0
# Tests of which some cases are enough have the others marked as `full`.
WITH_FULL := $(if $(filter-out 0,$(FULL)),-m 'not soak')
DEMO_FLAGS ?=
BENCH_FLAGS ?=
# Of make docs: 0 leaves out the programs that stand in the pages, and the tutorials.
DOCS_PROGRAMS ?= 1
# Of make test-changed: the commit to compare with, and seconds of tests.
BASE ?=
BUDGET ?= 180

# Warnings and errors of TensorFlow only.
export TF_CPP_MIN_LOG_LEVEL ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
OPS := tf_recsync/_recsync_ops.so
CC_FILES := $(shell find cc -name '*.cc' -o -name '*.h')

# A click log of 26 categorical columns, on two workers and two parameter
# servers of this machine. SWAP's period is a fifth of the run's global steps.
DEMO_CHECKPOINTS := build/demo_checkpoints
DEMO := examples/wide_deep_ctr.py --dataset=synthetic --rows=300000 --batch_size=512 \
  --strategy=gba --global_batch_size=1024 --staleness_tolerance=4 --workers=2 --ps=2 \
  --optimizer=swap_adagrad --swap_period=60 \
  --deep_learning_rate=0.05 --linear_learning_rate=0.05 \
  --checkpoint=$(DEMO_CHECKPOINTS) --checkpoint_every_seconds=2

# What makes a benchmark small; one without a line here runs with its defaults.
# BENCH_FLAGS, if set, takes the place of these.
SMALL_adam_staleness := --steps=300 --seeds=1
SMALL_all_reduce := --elements=1000,1000000 --rounds=5
SMALL_async_quality := --workers=2,4 --processes=3 --seeds=1 --days=1 --swap_days=2 --rows=4096 \
  --steps=100 --compute_seconds=0.03 --speed_seconds=2 --sync_days=1
SMALL_compression := --rounds=5
SMALL_coordinator := --workers=8,16 --processes=3 --seconds=4
SMALL_data_formats := --rows=40000 --row_group=10000 --rounds=3
SMALL_hierarchical := --easgd_trainers=2 --easgd_ps=2 --easgd_groups=1 --groups=1,2 --group_size=1 \
  --nodes=1,2 --ablation_size=2 --rounds=1 --seeds=1 --rows=4096 --speed_seconds=4 --top_layers=4 \
  --search_seconds=2 --device_seconds=0.2 --nets=3 --narrow_nets=4 --quality_faster=1
SMALL_hop := --workers=8 --processes=4 --iterations=24 --compute_seconds=0.15
SMALL_hop_accuracy := --workers=4 --epochs=1 --settings=2,7,8,12
SMALL_hop_queues := --rounds=3
SMALL_keys := --keys=131072 --batches=8 --rounds=3
SMALL_interpolation := --rounds=7
SMALL_local_adagrad := --rounds=3 --steps=30
SMALL_local_throughput := --batch_size=512 --rounds=3 --round_seconds=1
SMALL_metrics_cost := --batch_size=512 --rounds=15 --round_seconds=0.3
SMALL_modes := --workers=8 --processes=5 --compute_seconds=0.2 --steps=96 --rounds=1 \
  --day_seconds=12
SMALL_ps_throughput := --batch_size=512 --rounds=3 --round_seconds=2 --legacy_choice=legacy:10
SMALL_recording := --rounds=3 --steps=160
SMALL_scaling := --workers=1,4 --rounds=2 --round_seconds=2
SMALL_shadowsync := --trainers=2,4 --quality_trainers=2,4 --gaps=10 --thread_trainers=2 \
  --thread_counts=1,2 --rounds=1 --seeds=1 --rows=4096 --speed_seconds=6 --compute_seconds=0.15 \
  --processes=4
SMALL_simulation := --workers=4 --steps_per_worker=24
SMALL_tables := --gigabytes=0.2 --rounds=3 --save_seconds=2
SMALL_switching := --workers=4 --processes=3 --seeds=2 --sync_days=2 --mode_days=1 \
  --return_days=1 --rows=8192

# The programs among benchmarks/*.py; the rest are modules that they share.
BENCHMARKS := $(filter-out benchmarks/summarize.py, \
  $(sort $(shell grep -l '__name__ == "__main__"' benchmarks/*.py)))
BENCH_INSTALLED := $(VENV)/.bench_installed
DOCS_INSTALLED := $(VENV)/.docs_installed
BENCH_RESULTS := build/benchmarks

.DEFAULT_GOAL := help
.PHONY: help install build demo test soak fuzz test-changed coverage lint format docs bench results cc-test \
  bazel-test wheel clean

help:
	@echo "make demo        train a Wide & Deep click model on a local cluster"
	@echo "make test        the Python tests and the examples in docstrings; FULL=1: in all combinations"
	@echo "make soak        the tests that take long by their nature; make test leaves them out"
	@echo "make fuzz        call the ops with what is mostly right, until one ends its process"
	@echo "make test-changed  the tests that reach what you have changed, in about three minutes"
	@echo "make coverage    record which test reaches which line"
	@echo "make lint        ruff and clang-format, which must find nothing"
	@echo "make format      have ruff and clang-format rewrite what they can"
	@echo "make results     the papers' figures, simulated; writes docs/results"
	@echo "make cc-test     the C++ tests, under the sanitizers"
	@echo "make bazel-test  the same build with Bazel"
	@echo "make docs        the documentation site, into build/docs; DOCS_PROGRAMS=0 runs no programs of it"
	@echo "make bench       every benchmark, small; writes benchmarks/results.md"
	@echo "make wheel       the packages, into dist: the sources, and a wheel for this machine's Python"
	@echo "make build       compile what has changed; make install: .venv first"
	@echo "make clean       remove what was built, but not .venv"

# The build requirements come first and into .venv itself: with pip's isolated
# builds, TensorFlow would be downloaded a second time.
$(INSTALLED): pyproject.toml setup.py
	@echo "== Installing TensorFlow and the rest into $(VENV) (takes minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit( \
	  f"tf_recsync needs Python 3.11 or newer, $(VENV) has {v[0]}.{v[1]}; remove it, and set PYTHON")'
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["build-system"]["requires"], sep="\n")' > $(VENV)/build-requirements.txt
	@$(PIP) install -r $(VENV)/build-requirements.txt
	@echo "== Building tf_recsync"
	@$(PIP) install --no-build-isolation --editable '.[tensorflow-cpu,dev]'
	@touch $@

$(OPS): $(CC_FILES) | $(INSTALLED)
	@echo "== Building what has changed in cc/"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

install: $(INSTALLED)

build: $(OPS)

demo: build
	@echo "== Training a Wide & Deep click model on 2 workers and 2 parameter servers"
	@rm -rf $(DEMO_CHECKPOINTS)
	@$(BIN)/python $(DEMO) $(DEMO_FLAGS)

test: build
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=10 $(WITH_FULL) $(PYTEST_FLAGS)

soak: build
	@echo "== Tests that take minutes by their nature: about a quarter of an hour"
	@$(BIN)/python -m pytest -m soak --durations=10 $(PYTEST_FLAGS)
	@echo "== Tests that kill servers, stop them or cut connections, $(SOAK_ROUNDS) times: minutes each"
	@for round in $$(seq $(SOAK_ROUNDS)); do echo "== Round $$round" && \
	  $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not soak' \
	  $(PYTEST_FLAGS) $(SOAK_FILES) || exit 1; done

fuzz: build
	@echo "== Calls of all ops with arguments that are mostly right: $(FUZZ_FLAGS)"
	@$(BIN)/python scripts/fuzz_ops.py $(FUZZ_FLAGS)

test-changed: build
	@$(BIN)/python scripts/test_changed.py --budget=$(BUDGET) $(if $(BASE),--base=$(BASE)) \
	  --processes=$(TEST_PROCESSES) --pytest='$(PYTEST_FLAGS)'

coverage: $(INSTALLED)
	@$(BIN)/python scripts/record_coverage.py --pytest='$(PYTEST_FLAGS)'

lint: $(INSTALLED)
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== clang-format"
	@command -v clang-format > /dev/null || { \
	  echo "clang-format is missing; apt-get install clang-format" >&2; exit 1; }
	@clang-format --dry-run --Werror $(CC_FILES)

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@clang-format -i $(CC_FILES)

$(DOCS_INSTALLED): $(INSTALLED)
	@echo "== Installing Sphinx into $(VENV)"
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $(VENV)/docs-requirements.txt
	@$(PIP) install -r $(VENV)/docs-requirements.txt
	@touch $@

# A warning is an error: of docstrings, links between pages, and links to their headings.
docs: build $(DOCS_INSTALLED)
	@echo "== Building build/docs"
	@$(BIN)/python scripts/run_tutorials.py --check
	@$(BIN)/python -m sphinx -q -b html -W --keep-going -d build/docs-trees docs build/docs
	@$(BIN)/python scripts/check_documentation.py --site=build/docs
ifneq ($(DOCS_PROGRAMS),0)
	@echo "== Running the programs of the pages"
	@$(BIN)/python scripts/check_documentation.py --programs
	@echo "== Running the tutorials"
	@$(BIN)/python scripts/run_tutorials.py --execute-only
endif
	@echo "== build/docs/index.html"

# TensorFlow's libraries stay outside of the wheel: they are those of the TensorFlow that loads it.
# The tag says the oldest glibc that it works with; a build in an image of manylinux gives an older
# one (docs/installation.md).
wheel: build
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["project"]["optional-dependencies"]["packages"], sep="\n")' \
	  > $(VENV)/packages-requirements.txt
	@$(PIP) install -r $(VENV)/packages-requirements.txt
	@rm -rf build/dist build/lib* build/bdist* dist  # In lib, modules of earlier versions may lie.
	@echo "== Building the source distribution and the wheel"
	@$(BIN)/python -m build --no-isolation --sdist --outdir=dist . > /dev/null
	@$(BIN)/python -m build --no-isolation --wheel --outdir=build/dist . > /dev/null
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir=dist \
	  --exclude 'libtensorflow_*' build/dist/*.whl
	@ls -l dist

# tf_keras asks for the package tensorflow, whose files would replace those of
# tensorflow-cpu: it is installed without what it depends on.
$(BENCH_INSTALLED): $(INSTALLED)
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["project"]["optional-dependencies"]["bench"], sep="\n")' \
	  > $(VENV)/bench-requirements.txt
	@$(PIP) install --no-deps -r $(VENV)/bench-requirements.txt
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["project"]["optional-dependencies"]["plot"], sep="\n")' \
	  > $(VENV)/plot-requirements.txt
	@$(PIP) install -r $(VENV)/plot-requirements.txt
	@touch $@

bench: build $(BENCH_INSTALLED)
	@rm -rf $(BENCH_RESULTS) && mkdir -p $(BENCH_RESULTS)
	@$(foreach b,$(BENCHMARKS),echo "== $(b)" && \
	  $(BIN)/python $(b) --json=$(BENCH_RESULTS)/$(basename $(notdir $(b))).json \
	  $(or $(BENCH_FLAGS),$(SMALL_$(basename $(notdir $(b))))) && ) true
	@$(BIN)/python benchmarks/summarize.py --output=benchmarks/results.md $(BENCH_RESULTS)/*.json
	@echo "== benchmarks/results.md"

# Some minutes; what is there already is not computed again, so that it can be interrupted.
results: build $(BENCH_INSTALLED)
	@mkdir -p docs/results
	@echo "== Simulated figures of the papers, into docs/results: remove its files to have them anew"
	@$(BIN)/python scripts/results_on_servers.py --output=docs/results
	@$(BIN)/python scripts/results_on_gba.py --output=docs/results
	@$(BIN)/python scripts/results_with_copies.py --output=docs/results

cc-test: $(INSTALLED)
	@FULL=$(FULL) scripts/cc_test.sh

bazel-test: $(INSTALLED)
	@scripts/bazel_test.sh

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f tf_recsync/*.so tf_recsync/*.linking bazel-bin bazel-out bazel-testlogs bazel-$(notdir $(CURDIR))
	find tf_recsync tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
