# The door of the project: everything here works from a clean clone and sets up what it needs (tools/setup).
# All that is made lies under build/.
SHELL := /bin/bash
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local

.PHONY: help build setup run install test test-slow test-ranks test-interop test-cuda asan tsan fuzz check format tables clean

help:
	@echo "make build        build/release/fusedmoe and build/release/fusedmoe_vectors"
	@echo "make run          a sample layer of Qwen3-30B-A3B sizes in NVFP4: plan, check, speed"
	@echo "make install      library, headers and command below PREFIX (/usr/local)"
	@echo "make test         tools/check, all tests of the release build"
	@echo "make test-slow    every scheme through every backend, 25 drawn problems each"
	@echo "make test-ranks   the tests under mpirun     make test-interop   against the Python ecosystem"
	@echo "make test-cuda    the tests that need a card"
	@echo "make asan         tests under address and undefined, make tsan under thread; make fuzz: fuzz targets"
	@echo "make check        tools/check    make format   clang-format everything"
	@echo "make tables       write the generated pages  make clean          remove build/"

setup:
	@tools/setup base mpi

build: setup
	@cmake --preset release </dev/null
	@cmake --build build/release -j $(JOBS) --target fusedmoe_cli fusedmoe_vectors </dev/null

run: build
	@tools/run_sample

install: setup
	@cmake --preset release </dev/null
	@cmake --build build/release -j $(JOBS) --target fusedmoe_installed </dev/null
	@cmake --install build/release --prefix "$(PREFIX)"

test: setup
	@tools/run_tests --check release

test-slow: setup
	@tools/run_tests --label slow release

test-ranks: setup
	@tools/run_tests --label ranks mpi

test-interop: setup
	@tools/setup interop
	@tools/run_tests --label interop release

test-cuda: setup
	@tools/run_tests --label cuda cuda
	@tools/sanitize_cuda

asan: setup
	@tools/run_tests --label asan asan

tsan: setup
	@tools/run_tests --label tsan tsan

fuzz: setup
	@tools/fuzz 60

check:
	@tools/check

format:
	@git ls-files -co --exclude-standard '*.hpp' '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -r clang-format-14 -i

tables: build
	@python3 tools/check_tables.py --write

clean:
	@rm -rf build
