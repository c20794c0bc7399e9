# A thin front: everything is done by tools/project.py, which also runs without make.
PYTHON ?= python3

# The check is written so that every Python can read it, however old.
OLD = import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: help book test bench serve env assignments grade colab try-colab address clean python
help:
	@echo "make book   environment, execution, pages; prints where to open them"
	@echo "make test   environment, book, all tests"
	@echo "make bench  environment, benchmarks"
	@echo "make serve  the built book on a local address"
	@echo "make assignments   notebooks for students, solutions, and what grades them"
	@echo "make grade SUBMISSIONS=folder OUT=grades.csv ASSIGNMENT=name   grades a folder, goes on where it was"
	@echo "make colab  chapters that carry the package and run anywhere; CHAPTERS='name name' for some"
	@echo "make try-colab   runs them with packages such as Colab has, goes on where it was"
	@echo "make address REPOSITORY=https://github.com/owner/name TAG=v1.0   where the book is published"
	@echo "make clean  removes the environment and everything that was built"

book test bench serve env assignments clean: python
	@"$(PYTHON)" tools/project.py $@

grade: python
	@test -n "$(SUBMISSIONS)" && test -n "$(OUT)" || { echo "Name both, as in 'make grade SUBMISSIONS=folder OUT=grades.csv ASSIGNMENT=name'" >&2; exit 1; }
	@"$(PYTHON)" tools/project.py grade "$(SUBMISSIONS)" "$(OUT)" $(if $(ASSIGNMENT),--assignment "$(ASSIGNMENT)") $(if $(SEED),--seed "$(SEED)") $(if $(WORKERS),--workers "$(WORKERS)")

colab try-colab: python
	@"$(PYTHON)" tools/project.py $@ $(CHAPTERS) $(if $(TORCH),--torch "$(TORCH)")

address: python
	@test "$(origin REPOSITORY)" = "command line" || { echo "Name it, as in 'make address REPOSITORY=https://github.com/owner/name TAG=v1.0' (REPOSITORY= takes it away)" >&2; exit 1; }
	@"$(PYTHON)" tools/project.py address "$(REPOSITORY)" $(if $(TAG),--tag "$(TAG)") $(if $(BRANCH),--branch "$(BRANCH)")

python:
	@command -v "$(PYTHON)" >/dev/null || { echo "No '$(PYTHON)' found: install Python 3.11 or newer, or name one, as in 'make book PYTHON=python3.11'" >&2; exit 1; }
	@"$(PYTHON)" -c "$(OLD)" || { echo "'$(PYTHON)' is too old or does not run: install Python 3.11 or newer and name it, as in 'make book PYTHON=python3.11'" >&2; exit 1; }
