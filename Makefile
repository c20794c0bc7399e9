# A thin front: everything is done by tools/project.py, which also runs without make.
PYTHON ?= python3

# The check is written so that every Python can read it, however old.
OLD = import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: help book test bench serve env clean python
help:
	@echo "make book   environment, execution, pages; prints where to open them"
	@echo "make test   environment, book, all tests"
	@echo "make bench  environment, benchmarks"
	@echo "make serve  the built book on a local address"
	@echo "make clean  removes the environment and everything that was built"

book test bench serve env clean: python
	@"$(PYTHON)" tools/project.py $@

python:
	@command -v "$(PYTHON)" >/dev/null || { echo "No '$(PYTHON)' found: install Python 3.11 or newer, or name one, as in 'make book PYTHON=python3.11'" >&2; exit 1; }
	@"$(PYTHON)" -c "$(OLD)" || { echo "'$(PYTHON)' is too old or does not run: install Python 3.11 or newer and name it, as in 'make book PYTHON=python3.11'" >&2; exit 1; }
