# A thin front over CMake; `make help` lists what there is.
BUILD ?= build
PREFIX ?= /usr/local
PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
CMAKE_FLAGS ?=

.PHONY: all python setup-build setup-bench setup-test check test bench demo lint wheels install clean help

all:
	@command -v cmake >/dev/null || \
	    { echo "cmake is missing; tools/setup build installs it" >&2; exit 1; }
	@mkdir -p $(BUILD)
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release $(CMAKE_FLAGS) >$(BUILD)/configure.log 2>&1 || \
	    { cat $(BUILD)/configure.log >&2; exit 1; }
	@MAKEFLAGS= cmake --build $(BUILD) --parallel $(JOBS) -- --no-print-directory

setup-build setup-bench setup-test:
	@tools/setup $(@:setup-%=%)

check: setup-test
	@tests/run check

test: setup-test
	@tests/run

bench: setup-bench
	@$(MAKE) --no-print-directory all python
	$(BUILD)/orchard bench
	.venv/bin/python bench/compare_torch.py
	.venv/bin/python bench/bench_gpt2.py

# The package with PyTorch, in an environment of this folder's own.
python: .venv/ready
	@echo "installing the Python package into .venv"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) .venv/bin/pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps --force-reinstall .

.venv/ready: bench/bench_requirements.txt
	@echo "installing PyTorch into .venv"
	@[ -x .venv/bin/pip ] || $(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet --disable-pip-version-check -r bench/bench_requirements.txt
	@touch $@

demo: setup-bench
	@$(MAKE) --no-print-directory all
	@$(BUILD)/orchard doctor
	@$(BUILD)/orchard_demo_backends
	@$(BUILD)/orchard_demo
	@$(MAKE) --no-print-directory python
	@.venv/bin/python examples/tiny_gpt.py

lint: setup-test
	@tools/lint
	@[ "$$(uname)" != Linux ] || tests/macos_test $(BUILD)

wheels: setup-bench
	@$(PYTHON) tools/wheels

install: all
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	@rm -rf $(BUILD)

help:
	@echo "make            liborchard.a, liborchard.so and the orchard command, in $(BUILD)/"
	@echo "make demo       installs what is missing, builds, and shows what Orchard does (some minutes)"
	@echo "make check      the useful part of the tests in two minutes: for every edit"
	@echo "make test       installs what is missing, then every test"
	@echo "make python     the Python package and PyTorch, in .venv/"
	@echo "make bench      speed here, and side by side with PyTorch"
	@echo "make lint       format, sizes, who includes whom; builds everything for macOS, with zig"
	@echo "make wheels     Python wheels for Linux and macOS, x86-64 and Arm, in dist/"
	@echo "make install    headers, libraries, pkg-config file, CMake package; PREFIX=$(PREFIX)"
	@echo "make clean      removes $(BUILD)/"
