# Statecut. Every target sets itself up first: two commands are enough on a fresh machine.
VERSIONS := 3.11 3.12 3.13
# The first that runs: pyenv has a command for each version, which fails where that is not chosen.
PYTHON ?= $(shell for version in $(VERSIONS) 3; do python$$version -c '' 2>/dev/null && break; done; echo python$$version)
BIN := .venv/bin
# Two test processes on two cores: more threads in each would only get in the other's way.
THREADS := OMP_NUM_THREADS=1
# Containers set it, and then each of some 300 jobs would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-oldest test-report test-slurm test-llama lint pins pins-check dag flame profiles clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 13

setup: .venv/installed  ## make .venv and install everything the demo and the tests need

# pip would compile on one core. Left out are tests, and a file of torch that 3.11 cannot read.
.venv/installed: envs/constraints.txt pyproject.toml src/reproduction/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(VERSIONS)".split())' \
	  || { echo "Statecut needs one of Python $(VERSIONS); say where it is: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c envs/constraints.txt -e '.[recovery,dev]' -e src/reproduction
	$(BIN)/python -W ignore -m compileall -q -j 0 -x '/tests?/|py312_' .venv/lib
	@touch $@

# Libraries are loaded once for all jobs; without that the same jobs take longer.
demo: setup  ## the whole workflow at toy size, on a CPU, without a network
	$(BIN)/python -m reproduction.running.preload $(BIN)/snakemake --profile profiles/demo

test: demo  ## the demo, then all tests
	$(THREADS) $(BIN)/python -m pytest -n 2

# The oldest transformers that Statecut runs with, before the pinned one.
OLDEST := transformers==5.17.0

test-oldest: setup  ## the tests of models with the oldest transformers, in minutes
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/oldest $(OLDEST)
	$(THREADS) PYTHONPATH=$(CURDIR)/.venv/oldest $(BIN)/python -m pytest -n 2 tests/test_models_*.py \
	  $(patsubst %,tests/test_%.py,exact slicing calibration refit checkpoint inspection training_recovery)

test-report: setup  ## the report in headless Chromium
	$(THREADS) $(BIN)/python -m pytest tests/report/check_page.py

test-slurm: setup  ## every fault of a cluster, and the demo through it; needs Slurm, takes an hour and a half
	$(THREADS) CI=true $(BIN)/python -m pytest -vv --durations=0 \
	  $(addprefix tests/slurm/,test_small_run.py test_unmet.py check_demo.py check_faults.py)

# The source package holds llama.cpp with its converter, which a wheel leaves out.
LLAMA := .venv/llama

test-llama: $(LLAMA)/built  ## square models in llama.cpp, which it builds first; needs CMake and a C++ compiler, takes minutes
	$(THREADS) LLAMA_CPP_LIB_PATH=$(LLAMA)/build/bin \
	  PYTHONPATH=$(LLAMA):$(LLAMA)/vendor/llama.cpp:$(LLAMA)/vendor/llama.cpp/gguf-py \
	  $(BIN)/python -m pytest tests/llama/check_llama.py

$(LLAMA)/built: envs/llama.txt .venv/installed
	rm -rf $(LLAMA)
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMA) -r envs/llama.txt
	tar -xzf $(LLAMA)/llama_cpp_python-*.tar.gz --strip-components 1 -C $(LLAMA)
	$(BIN)/pip install --quiet --no-deps --target $(LLAMA) $(LLAMA)/diskcache-*.whl
	cmake -S $(LLAMA) -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release -DLLAVA_BUILD=OFF
	cmake --build $(LLAMA)/build --target llama --parallel 2
	@touch $@

lint: setup  ## ruff, mypy, import-linter, snakefmt
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/snakefmt --check workflow

pins: setup  ## write environment.yml and envs/*.yaml from envs/constraints.txt and flame.txt
	$(BIN)/python envs/pins.py

# A pip of its own: older ones end such a check by downloading all the wheels, torch among them.
pins-check: setup  ## after a change of a pin: is there a wheel for each Python, and do all agree?
	$(BIN)/pip install --quiet --upgrade --target .venv/pins-check 'pip>=26.3'
	PYTHONPATH=.venv/pins-check $(BIN)/python envs/pins_check.py $(VERSIONS)

dag: setup  ## draw the rules of the workflow into docs/workflow/run.md
	$(BIN)/python docs/dag.py

flame: setup  ## install flame and torchtitan from git, for pretraining as the paper does
	$(BIN)/pip install --no-deps --no-build-isolation -r envs/flame.txt

profiles: setup  ## let `snakemake --profile slurm` find the profiles of this checkout
	@folder=$$($(BIN)/python -c 'from snakemake.common import get_appdirs; print(get_appdirs().user_config_dir)') \
	  && mkdir -p "$$folder" && for profile in $(filter-out %/default,$(wildcard profiles/*)); do link="$$folder/$${profile##*/}"; \
	    if [ -e "$$link" ] || [ -L "$$link" ]; then echo "$$link is there already: left as it is"; \
	    else ln -s "$(CURDIR)/$$profile" "$$link" && echo "$$link -> $(CURDIR)/$$profile"; fi; done

clean:  ## remove the virtual environment and caches; results stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
