# Everything a checkout needs, in its own .venv. `make help` lists the targets.

PYTHON ?= python3
DATA ?=
DEMO_ARGS ?=
DEVICE ?=
SHORT ?=
FIRST ?= 0
FUZZ_SECONDS ?= 600
FUZZ_TARGET ?= bounded
EXECUTIONS ?= 1000000
PAPER_ARGS ?=
SOAK_ARGS ?=
# Of the Python tests that `make test` runs; "not trio" adds the slow ones.
MARKERS ?= not slow
ACTIONS ?= 100000
# Processes that share the Python tests out; each test of ranks starts 2 to 8 more.
TEST_JOBS ?= 2
STUDY_ARGS ?=
TORCHREC ?= give-TORCHREC=DIR
VALUES ?= 1000000000

VENV := .venv
BIN := $(VENV)/bin
PINS := pyproject.toml torchrec_bls/_trios.py
# The newest, unless another one is named.
TRIO ?= $(lastword $(shell $(PYTHON) torchrec_bls/_trios.py --names))
TRIO_ENV := build/trio-$(TRIO)
TRIO_PYTHON ?= $(BIN)/python
TRIO_TESTS ?= tests/contract tests/distributed tests/backend tests/test_delta_writer.py tests/test_lookup_notes.py tests/direct/test_trained_deltas.py tests/package/test_versions.py tests/package/test_torch_alone.py tests/test_public_api.py
CXX_OR_DEFAULT := $(if $(filter-out default undefined,$(origin CXX)),$(CXX),c++)
# torchrun, ninja and the like are found by the tools that call them.
WITH_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -type f -not -path "csrc/tests/*")
CXX_FILES := $(shell find csrc benchmarks -type f \( -name '*.h' -o -name '*.cpp' \) 2>/dev/null)
FUZZ_TARGETS := $(notdir $(wildcard tests/corpus/*))
# The first of each version that starts: a name on the path may be a stand-in that finds none.
PYTHONS ?= $(shell for minor in 10 11 12 13 14; do \
    for python in python3.$$minor "$$HOME"/.pyenv/versions/3.$$minor.*/bin/python3.$$minor; do \
      if "$$python" -c "" 2> /dev/null; then command -v "$$python"; break; fi; \
    done; \
  done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build build-tests demo check test test-all test-slow test-cpp test-arm test-model test-sanitizers test-verbs test-trio test-torchrec faults random-actions model \
  fuzz fuzz-blindly guarantee records-stale soak paper-bls paper-libra study-quantized study-bounded study-planner study-simulator docs docs-links notebooks figures lint format wheel wheels \
  benchmarks-build clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

build: $(VENV)/.built  ## Set up .venv and build the package into it

demo: build  ## Run the main job: make demo [DATA=path] [DEMO_ARGS="..."]
	$(WITH_VENV) $(BIN)/python -m benchmarks.demo.run $(if $(DATA),--data "$(DATA)") --out out/demo $(DEMO_ARGS)

check: build build-tests lint  ## Lint, the quick C++ tests, pure Python and a smoke test a subsystem (90 seconds)
	build/native/csrc/tests/bls_tests --source-file-exclude='*test_stress*'
	$(call pytest,smoke or not (full or slow))

test: build build-tests  ## Run the C++ and Python tests but for the slow ones (7 minutes)
	$(call run-cpp-tests)
	$(call pytest,$(MARKERS))

test-slow: build  ## Run the Python tests that `make test` leaves out
	$(call pytest,slow and not trio)

test-all: MARKERS = not trio
test-all: test test-model  ## Run every test

test-cpp: build-tests  ## Run the C++ tests alone
	$(call run-cpp-tests)

build-tests: build  ## Build the C++ tests
	@$(call need,C++ unit tests,doctest-dev,$(has_doctest))
	$(call build-native,-DBLS_BUILD_TESTS=ON)

# RelWithDebInfo, since whole programs are optimized in Release, which takes longer than the tests.
test-arm: $(VENV)/.packages  ## Run the C++ tests for ARM under emulation: what they do, not how fast
	@$(call need,C++ unit tests,doctest-dev,$(has_doctest))
	@$(call need,cross compiler and emulator,g++-aarch64-linux-gnu qemu-user,$(has_arm))
	$(call configure,build/arm,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DBLS_BUILD_TESTS=ON $(arm))
	$(BIN)/cmake --build build/arm
	$(BIN)/ctest --test-dir build/arm --output-on-failure --no-tests=error

test-model:  ## Check the small instances of the models of the channel alone
	$(call check-models,--quick)

random-actions: build  ## Do 10^5 random actions on 2 to 4 ranks, on served models and on a service, and first forwards (3 hours)
	$(WITH_VENV) $(BIN)/python -m tests.random_actions --actions $(ACTIONS) --json out/random-actions.json
	$(WITH_VENV) $(BIN)/python -m tests.random_actions.serving --actions $(ACTIONS) --json out/random-actions-serving.json
	$(WITH_VENV) $(BIN)/python -m tests.random_actions.refreshes
	$(WITH_VENV) $(BIN)/python -m tests.random_actions.rows --actions $(ACTIONS) --json out/random-actions-rows.json
	$(WITH_VENV) $(BIN)/python -m tests.random_actions.service --actions $(ACTIONS) --json out/random-actions-service.json

model:  ## Check all instances of the models of the channel with Spin (10 to 20 minutes, 6 GB)
	$(call check-models)

test-sanitizers: $(VENV)/.packages  ## Run the C++ tests under sanitizers
	@$(call need,C++ unit tests,doctest-dev,$(has_doctest))
	$(call test_with,address$(comma)undefined)
	$(call test_with,thread)

test-verbs: build build-tests  ## Run the verbs tests on Soft-RoCE in a guest, or on a device: make test-verbs [DEVICE=mlx5_0] [SHORT=1]
	@$(call need,RDMA,$(rdma_packages),$(has_rdma))
	@$(if $(DEVICE),:,($(call need,qemu and what the guest is made of,$(guest_packages),$(has_guest))) || :)
	$(BIN)/python -m tests.verbs $(if $(DEVICE),--device "$(DEVICE)") $(if $(SHORT),--short)

fuzz: $(VENV)/.packages  ## Search for bytes of a peer that do harm: make fuzz [FUZZ_SECONDS=600]
	@$(call need,Clang with libFuzzer,clang libclang-rt-dev,$(has_libfuzzer))
	CXX=clang++ $(call configure,build/fuzz,-DBLS_BUILD_FUZZERS=ON -DBLS_SANITIZE=address$(comma)undefined)
	$(BIN)/cmake --build build/fuzz
	@for target in $(FUZZ_TARGETS); do \
	  echo "=== $$target" && mkdir -p "build/fuzz/corpus/$$target" && build/fuzz/csrc/fuzz/fuzz_$$target \
	    -max_total_time=$$(( $(FUZZ_SECONDS) / $(words $(FUZZ_TARGETS)) )) -timeout=10 -verbosity=0 \
	    -print_final_stats=1 -artifact_prefix="build/fuzz/$$target-" \
	    "build/fuzz/corpus/$$target" "tests/corpus/$$target" || exit 1; \
	done

# Without libFuzzer, and therefore blind; the formats have a checksum that nothing blind gets past, which
# both targets have none of or know.
fuzz-blindly: $(VENV)/.packages  ## Change inputs at random: make fuzz-blindly [FUZZ_TARGET=bounded] [EXECUTIONS=1000000] [FIRST=0]
	$(call configure,build/sanitize-address$(comma)undefined,-DBLS_BUILD_TESTS=ON -DBLS_SANITIZE=address$(comma)undefined)
	$(BIN)/cmake --build build/sanitize-address$(comma)undefined --target fuzz_$(FUZZ_TARGET)
	build/sanitize-address$(comma)undefined/csrc/fuzz/fuzz_$(FUZZ_TARGET) tests/corpus/$(FUZZ_TARGET) $(EXECUTIONS) $(FIRST)

guarantee: build-tests  ## Look for values beyond their bound: make guarantee [VALUES=1000000000] [FIRST=0]
	$(BIN)/cmake --build build/native --target bls_guarantee
	build/native/csrc/tests/bls_guarantee $(VALUES) $(FIRST)

records-stale: build  ## List the records whose code has changed since the commits that they name
	@$(WITH_VENV) $(BIN)/python -m benchmarks.stale

soak: build  ## Exchange and check messages for 10^6 iterations: make soak [SOAK_ARGS="..."]
	$(WITH_VENV) $(BIN)/python -m benchmarks.soak.soak --json out/soak.json $(SOAK_ARGS)

paper-bls: build $(VENV)/.mpi4py  ## Measure what the BLS paper shows: make paper-bls [DATA=path] [PAPER_ARGS="..."]
	$(WITH_VENV) $(BIN)/python -m benchmarks.paper_bls.evaluation $(if $(DATA),--data "$(DATA)") $(PAPER_ARGS)

paper-libra: build  ## What the LIBRA paper prints, under its own model: make paper-libra [PAPER_ARGS="..."] (3 minutes)
	$(WITH_VENV) $(BIN)/python -m benchmarks.libra.study $(PAPER_ARGS)

study-quantized: build  ## What quantized collectives cost in accuracy: make study-quantized [STUDY_ARGS="..."]
	$(WITH_VENV) $(BIN)/python -m benchmarks.quantized.study $(STUDY_ARGS)

study-bounded: build  ## What error-bounded embeddings cost and save: make study-bounded [STUDY_ARGS="..."]
	$(WITH_VENV) $(BIN)/python -m benchmarks.bounded.study $(STUDY_ARGS)

study-planner: build  ## Calibrate this machine, compare cost models and planning with others
	mkdir -p out/study
	$(calibrate-for-study)
	$(WITH_VENV) $(BIN)/python -m benchmarks.planner.study_models \
	  --measurements out/study/profile.measurements.jsonl --json out/study/models.json
	$(WITH_VENV) $(BIN)/python -m benchmarks.planner.search \
	  --profile out/study/profile.json --json out/study/sharding_search.json

study-simulator: build  ## Calibrate this machine, compare simulated steps with measured ones (1.5 hours; it goes on where it stopped)
	mkdir -p out/study
	$(calibrate-for-study)
	$(WITH_VENV) $(BIN)/python -m benchmarks.simulator.lag \
	  --profile out/study/profile.json --json out/study/simulator_lag.json
	$(WITH_VENV) $(BIN)/python -m benchmarks.simulator.traced \
	  --profile out/study/profile.json --json out/study/simulator_traced.json
	$(WITH_VENV) $(BIN)/python -m benchmarks.simulator.transformer \
	  --profile out/study/profile.json --json out/study/simulator_transformer.json
	test "$$(id -u)" != 0 || $(WITH_VENV) $(BIN)/python -m benchmarks.simulator.links \
	  --profile out/study/profile.json --json out/study/simulator_links.json
	$(WITH_VENV) $(BIN)/python -m benchmarks.simulator.steps $(STUDY_ARGS) \
	  --profile out/study/profile.json --json out/study/simulator_steps.json
	$(WITH_VENV) $(BIN)/python -m benchmarks.simulator.study \
	  --steps out/study/simulator_steps.json --json out/study/simulator.json

# The wheel is installed, and run where the checkout's own package isn't found in its place. For
# another Python than .venv's it is built anew.
test-trio: build $(TRIO_ENV)/.packages  ## Test with another torch, fbgemm and torchrec: make test-trio [TRIO=2.14] [TRIO_PYTHON=python3.12] [TRIO_TESTS=tests/contract]
	rm -rf $(TRIO_ENV)/dist $(TRIO_ENV)/checkout
	$(if $(filter $(BIN)/python,$(TRIO_PYTHON)),$(call build-package,wheel --wheel-dir $(TRIO_ENV)/dist .),\
	  $(TRIO_ENV)/bin/python -m pip wheel --no-deps --wheel-dir $(TRIO_ENV)/dist .)
	$(TRIO_ENV)/bin/python -m pip install --no-deps --force-reinstall $(TRIO_ENV)/dist/*.whl
	mkdir $(TRIO_ENV)/checkout
	cp -r tests examples benchmarks docs README.md pyproject.toml $(TRIO_ENV)/checkout
	cd $(TRIO_ENV)/checkout && export PATH="$(CURDIR)/$(TRIO_ENV)/bin:$$PATH" \
	  && torchrec-bls doctor \
	  && python -m pytest $(TRIO_TESTS) \
	  && torchrun --nproc-per-node 2 examples/quickstart.py \
	  && python -m benchmarks.demo.run --ranks 2 --steps 12 --batch 64 --bounds 0 2 --out out/demo

test-torchrec: build  ## Run TorchRec's own tests over our sharders: make test-torchrec TORCHREC=DIR, a checkout of its release branch
	$(BIN)/python -m pip install --group torchrec-suite
	$(WITH_VENV) $(BIN)/python -m tests.torchrec_suite "$(TORCHREC)"

faults: build  ## Print the fault matrix with the times to detection (JSON in out/faults)
	$(WITH_VENV) $(BIN)/python -m tests.faults

docs: build $(VENV)/.docs  ## Build the documentation's site into out/docs; warnings and broken links are errors
	$(call build-docs,html,out/docs)

docs-links: build $(VENV)/.docs  ## Ask the Internet whether the documentation's external links are there
	$(call build-docs,linkcheck,out/docs-links)

notebooks: build  ## Write the notebooks to download from the pages in docs/notebooks
	for page in docs/notebooks/*.md; do $(BIN)/jupytext --quiet --to ipynb "$$page" || exit 1; done

figures: build  ## Draw the documentation's pictures anew
	for figure in docs/figures/*.py; do $(BIN)/python "$$figure" || exit 1; done

lint: $(VENV)/.packages  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(check-imports)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*
	$(BIN)/kubernetes-validate --strict --quiet examples/kubernetes/deployment.yaml
	$(BIN)/zizmor --quiet --offline .github

format: $(VENV)/.packages  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: $(VENV)/.packages  ## Build a wheel into build/dist and check what it holds
	rm -rf build/dist
	$(call build-package,wheel --wheel-dir build/dist .)
	@contents="$$($(BIN)/python -m zipfile --list build/dist/*.whl)"; \
	for wanted in torchrec_bls/__init__.py torchrec_bls/_native. torchrec_bls/_trios.py \
	    torchrec_bls/py.typed torchrec_bls/sharding/__init__.py \
	    torchrec_bls/sharding/costs/profiles/epyc-milan-2-cores.json torchrec_bls_command.py; do \
	  echo "$$contents" | grep --quiet --fixed-strings "$$wanted" \
	    || { echo "The wheel lacks $$wanted" >&2; exit 1; }; \
	done
	@echo "$$(ls build/dist/*.whl) holds the package, the planner and the native module"

wheels: $(VENV)/.wheels  ## Build wheels that travel into build/dist, and try them: make wheels [PYTHONS="python3.10 ..."]
	@$(call need,headers of RDMA,libibverbs-dev,$(has_verbs))
	$(WITH_VENV) $(BIN)/python -m tests.wheels $(PYTHONS)

benchmarks-build: build  ## Build the C++ side of the benchmarks
	@$(call need,Open MPI,$(mpi_packages),$(has_mpi))
	$(call build-native,-DBLS_BUILD_BENCHMARKS=ON)

clean:  ## Remove everything that was built, .venv included
	rm -rf $(VENV) build out .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(call need,$(PYTHON),$(notdir $(PYTHON)),command -v $(PYTHON))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is $$($(PYTHON) -V), 3.10 or later is needed: make PYTHON=..." >&2; exit 1; }
	@$(call need,venv of $(PYTHON),$(notdir $(PYTHON))-venv,$(PYTHON) -c 'import ensurepip; import venv')
	$(PYTHON) -m venv $(VENV)

$(VENV)/.packages: $(PINS) | $(BIN)/python
	$(call install,$(BIN),dev,)
	@touch $@

$(TRIO_ENV)/.packages: $(PINS) | $(BIN)/python
	test -x $(TRIO_ENV)/bin/python || $(TRIO_PYTHON) -m venv $(TRIO_ENV)
	$(call install,$(TRIO_ENV)/bin,trio,$(TRIO))
	@touch $@

$(VENV)/.built: $(VENV)/.packages $(NATIVE_SOURCES)
	@$(call need,C++ compiler,g++,command -v $(CXX_OR_DEFAULT))
	@$(call need,headers of $(PYTHON),$(notdir $(PYTHON))-dev,$(has_python_headers))
	@($(call need,headers of RDMA,libibverbs-dev,$(has_verbs))) || echo "It goes without, but only on one host"
	$(call build-package,install -e .)
	$(BIN)/python -c 'import torchrec_bls, torchrec_bls.sharding'
	@touch $@

$(VENV)/.wheels: $(PINS) | $(VENV)/.packages
	$(BIN)/python -m pip install --group wheels
	@touch $@

$(VENV)/.docs: $(PINS) | $(VENV)/.packages
	$(BIN)/python -m pip install --group docs
	@touch $@

$(VENV)/.mpi4py: $(PINS) | $(VENV)/.packages
	@$(call need,Open MPI,$(mpi_packages),$(has_mpi))
	$(BIN)/python -m pip install --group mpi
	@touch $@

comma := ,

has_doctest = echo '\#include <doctest/doctest.h>' | $(CXX_OR_DEFAULT) -x c++ -E - -o /dev/null
has_arm = command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64
# The C library of the cross compiler is where the emulator looks for it with -L.
arm = -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu"
has_libfuzzer = echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' \
  | clang++ -fsanitize=fuzzer$(comma)address$(comma)undefined -x c++ - -o /dev/null
has_python_headers = $(BIN)/python -c 'import os, sysconfig; \
  open(os.path.join(sysconfig.get_paths()["include"], "Python.h")).close()'

has_verbs = echo '\#include <infiniband/verbs.h>' | $(CXX_OR_DEFAULT) -x c++ -E - -o /dev/null
rdma_packages = libibverbs-dev ibverbs-providers ibverbs-utils rdma-core python3-pyverbs
has_rdma = $(has_verbs) && command -v ibv_rc_pingpong && ls /etc/libibverbs.d/* \
  && /usr/bin/python3 -c 'import pyverbs'

mpi_packages = openmpi-bin libopenmpi-dev
has_mpi = command -v mpirun && command -v mpicxx

# Some lie where only root looks for programs, and ldd fails on a static program as is wanted.
guest_packages = qemu-system-x86 busybox-static cpio kmod iproute2 rdma-core
has_guest = PATH="$$PATH:/usr/sbin:/sbin"; command -v qemu-system-x86_64 && command -v cpio \
  && command -v modprobe && command -v rdma && command -v busybox && ! ldd "$$(command -v busybox)"

# $(call install,folder with a Python,dependency group,trio): no trio means that of `make build`.
define install
$(1)/python -m pip install 'pip>=25.1'
$(1)/python -m pip install --group $(2) $$($(1)/python torchrec_bls/_trios.py $(3))
$(1)/python -m pip install --no-deps --group alone $$($(1)/python torchrec_bls/_trios.py --torchrec $(3))
endef

# One build of the core serves the package, the C++ tests and the benchmarks.
# $(call build-package,what pip does)
build-package = $(WITH_VENV) $(BIN)/python -m pip $(firstword $(1)) --no-build-isolation --no-deps \
  -C build-dir=build/native $(wordlist 2,$(words $(1)),$(1))

# $(call build-native,options): builds more of it.
define build-native
$(WITH_VENV) $(BIN)/cmake $(1) build/native
$(BIN)/cmake --build build/native
endef

# $(call configure,folder,options): configures the C++ sources without the Python module.
configure = $(WITH_VENV) $(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=Release -DBLS_BUILD_PYTHON=OFF $(2)

run-cpp-tests = $(BIN)/ctest --test-dir build/native -j $(TEST_JOBS) --output-on-failure --no-tests=error

# $(call pytest,markers): runs the Python tests that have them.
pytest = $(WITH_VENV) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m "$(1)"

# $(call build-docs,builder,folder)
build-docs = $(WITH_VENV) $(BIN)/python -m sphinx --builder $(1) --fail-on-warning --keep-going --jobs auto \
  --doctree-dir build/doctrees docs $(2)

# Where the packages lie as they are imported, beside a module for _native. Without `site`: the finder of an
# installed checkout would lead to that.
define check-imports
rm -rf build/imports && mkdir -p build/imports
cp -r torchrec_bls build/imports && cp -r sharding build/imports/torchrec_bls
touch build/imports/torchrec_bls/_native.py
cd build/imports && PYTHONPATH="$$("$(CURDIR)/$(BIN)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
  "$(CURDIR)/$(BIN)/python" -S "$(CURDIR)/$(BIN)/lint-imports" --no-logo --no-cache --config "$(CURDIR)/.importlinter"
endef

# A profile that is there already is kept.
calibrate-for-study = test -s out/study/profile.json \
  || $(WITH_VENV) $(BIN)/torchrec-bls calibrate --out out/study/profile.json

# $(call check-models,options)
define check-models
@$(call need,Spin,spin gcc libc6-dev,command -v spin && command -v gcc)
$(PYTHON) tests/model/check.py $(1)
endef

# $(call test_with,sanitizers): builds and runs the C++ tests with them.
define test_with
$(call configure,build/sanitize-$(1),-DBLS_BUILD_TESTS=ON -DBLS_SANITIZE=$(1))
$(BIN)/cmake --build build/sanitize-$(1)
$(BIN)/ctest --test-dir build/sanitize-$(1) -j $(TEST_JOBS) --output-on-failure --no-tests=error
endef

# $(call need,what,Debian packages,command that succeeds where it is there): root installs it, one make
# after the other.
define need
if ! { $(3); } > /dev/null 2>&1; then \
  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
    echo "Installing $(2) ($(1))" && flock Makefile sh -c 'apt-get update --quiet \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(2)'; \
  else \
    echo "$(1): not found. Install it with: sudo apt-get install $(2)" >&2; exit 1; \
  fi; \
fi
endef
