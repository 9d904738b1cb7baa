# One-liners. `make demo` and `make test` need Python 3.11+, pip and make; nothing else.
PYTHON ?= python3
BIN := .venv/bin
VENV ?= .venv
# VENV=none: what $(PYTHON) can import as it is, for a machine without a network. So far only test-gpu asks for it.
READY := $(if $(filter none,$(VENV)),,.venv/installed)
RUN := $(if $(filter none,$(VENV)),$(PYTHON),$(BIN)/python)
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-gpu gym kernels lint types check bench format clean

demo: .venv/installed ; $(BIN)/whet demo
# A file stays with one of two processes, for its fixtures. `slow` tests: trainings, kills at every write, compilers.
test: .venv/installed ; $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"
test-all: test kernels ; $(BIN)/python -m pytest -n 2 --dist loadfile -m slow
test-gpu: $(READY) ; $(RUN) -m benchmarks.gpu_tests
gym: .venv/installed ; $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gym]' # needs a C compiler
kernels: .venv/installed ; $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kernels]' && TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/fast/kernels tests/fast/test_fused_kernels.py tests/fast/test_graphs_kernels.py tests/draft/test_eagle.py # on a CPU, by Triton's interpreter
lint: .venv/installed ; $(BIN)/ruff check . && $(BIN)/ruff format --check .
types: .venv/installed ; $(BIN)/mypy
check: test lint types
bench: .venv/installed ; $(BIN)/whet bench rollout --out benchmarks/results
format: .venv/installed ; $(BIN)/ruff check --fix . && $(BIN)/ruff format .
clean: ; rm -rf .venv runs build dist

# torch is named alone first: its own version must be settled before anything else asks for it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,lora,dev]'
	touch $@
