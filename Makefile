# A thin front over CMake; `make help` lists what there is.
BUILD ?= build
PREFIX ?= /usr/local
PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
CMAKE_FLAGS ?=

.PHONY: all setup-build setup-bench setup-test test bench demo lint wheels install clean help

all:
	@command -v cmake >/dev/null || \
	    { echo "cmake is missing; tools/setup build installs it" >&2; exit 1; }
	@mkdir -p $(BUILD)
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release $(CMAKE_FLAGS) >$(BUILD)/configure.log 2>&1 || \
	    { cat $(BUILD)/configure.log >&2; exit 1; }
	@MAKEFLAGS= cmake --build $(BUILD) --parallel $(JOBS) -- --no-print-directory

setup-build setup-bench setup-test:
	@tools/setup $(@:setup-%=%)

test: setup-test
	@tests/run

bench: setup-bench
	@$(MAKE) --no-print-directory all .venv/ready
	$(BUILD)/orchard bench attention
	.venv/bin/python bench/compare_torch.py --library $(BUILD)/liborchard.so

.venv/ready: bench/requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r bench/requirements.txt
	@touch $@

demo: setup-build
	@$(MAKE) --no-print-directory all
	@$(BUILD)/orchard doctor
	@$(BUILD)/orchard_demo

lint: setup-test
	@tools/lint

wheels: setup-bench
	@$(PYTHON) tools/wheels

install: all
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	@rm -rf $(BUILD)

help:
	@echo "make            liborchard.a, liborchard.so and the orchard command, in $(BUILD)/"
	@echo "make demo       installs what is missing, builds, and shows what Orchard does (a minute)"
	@echo "make test       installs what is missing, then every test"
	@echo "make bench      speed here, and side by side with PyTorch"
	@echo "make lint       format, warnings, sizes"
	@echo "make wheels     Python wheels for Linux and macOS, x86-64 and Arm, in dist/"
	@echo "make install    headers, libraries, pkg-config file, CMake package; PREFIX=$(PREFIX)"
	@echo "make clean      removes $(BUILD)/"
