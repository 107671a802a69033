# `make check` before every change; `make full` runs everything, slow tests included.
PYTHON ?= python
# processes that share the suite, file by file
WORKERS ?= 2

.PHONY: install check lint test full docs wheel

install:
	$(PYTHON) -m pip install -e '.[dev]'

check: lint test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

test:
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist loadfile

full: lint
	$(PYTHON) -m pytest -q -m ''

docs:
	mkdir -p docs
	$(PYTHON) -m localtrain config --markdown > docs/config.md

wheel:
	$(PYTHON) -m build
