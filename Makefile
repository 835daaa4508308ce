# A developer's loop, in the environment that is active. .ci/run is the whole check, in a fresh one.
.PHONY: check format lint types changed test build

check: lint types changed # what a change needs before it is committed; a few minutes on two cores

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .
	@if command -v clang-format >/dev/null; then \
	    git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' | xargs clang-format --dry-run --Werror; \
	else echo 'clang-format is not installed: C++ files are not checked (see .pre-commit-config.yaml)'; fi

types:
	mypy

changed: # tests of what changed against main
	@tests=$$(.ci/changed_tests.py); [ -z "$$tests" ] || pytest -n auto --dist worksteal $$tests

test: # the whole suite
	pytest -n auto --dist worksteal

build: # after a change in csrc/
	python setup.py build_ext --inplace
