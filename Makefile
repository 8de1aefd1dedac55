# Every target sets up what it needs by itself: `make demo` and `make test` work from a clean clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# on a terminal pip shows what it loads, elsewhere only warnings
PIP     = -m pip install $(shell [ -t 2 ] || echo --quiet) --disable-pip-version-check

# without byte code a run of the tests costs a minute of CPU time more
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install install-integrations demo cluster-demo team-demo ec2-demo slurm-demo soak chaos simulate-faults planted-defects mutants coverage figures docs dist quick test test-all test-integrations slurm-test rooms matrix lint clean

help: ## what there is
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 20

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "adaptdl-elastic needs Python >= 3.10: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this Python has no venv: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(STAMP): setup.cfg constraints.txt | $(BIN)/python
	@echo "installing into $(VENV), 1 of 2: torch (200 MB without CUDA, several GB with it) ..."
	@$(BIN)/python $(PIP) -c constraints.txt torch
	@echo "installing into $(VENV), 2 of 2: this package, and what its tests need (300 MB) ..."
	@$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) ## a virtual environment with everything in it

demo: $(STAMP) ## the main job: an elastic run on this machine, with a summary and a picture
	@$(BIN)/python examples/demo.py

cluster-demo: $(STAMP) ## one job on three machines (as root; else on this one): one joins late, one is drained, one is killed
	@$(BIN)/python examples/cluster_demo.py

team-demo: $(STAMP) ## two people share three nodes over ssh; one node is unplugged, another is added
	@$(BIN)/python examples/team_demo.py

ec2-demo: $(STAMP) ## an auto-scaling group without an account: grows, is interrupted, shrinks
	@$(BIN)/python examples/ec2_demo.py

slurm-demo: $(STAMP) ## a training eats idle nodes of a Slurm, whose owner takes two and gives them back (as root)
	@PYTHONPATH=tests/support $(BIN)/python examples/slurm_demo.py

soak: $(STAMP) ## MINUTES=15 [HABITS=1]: replicas that come, go and are killed at random, and exact arithmetic at the end
	@$(BIN)/python benchmarks/soak.py --minutes $(or $(MINUTES),15) $(if $(HABITS),--habits)

chaos: $(STAMP) ## SECONDS=600 SEED=1: schedules of changes and deaths drawn at random, beyond those of the tests
	@ADAPTDL_CHAOS_SECONDS=$(or $(SECONDS),600) ADAPTDL_CHAOS_SEED=$(or $(SEED),1) \
		$(BIN)/python -m pytest -q -s --timeout 100000 tests/library/test_chaos.py tests/library/test_loop_grammar.py \
		tests/library/test_hang_watch.py -k more

simulate-faults: $(STAMP) ## SECONDS=60 (of CPU time) SEED=1: the real agents and coordinators in simulated clusters that fail in every way
	@PYTHONPATH=tests/simulation:tests/support $(BIN)/python -m faultsim --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1)

planted-defects: $(STAMP) ## SECONDS=60 SEED=1: 29 defects put into copies of the product, one by one, for simulate-faults or tests to find
	@$(BIN)/python tests/simulation/planted_defects.py --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1)

mutants: $(STAMP) ## SEED=1: 40 changes of one line in copies of the pure modules, for their tests to notice
	@$(BIN)/python tests/simulation/mutants.py --seed $(or $(SEED),1)

# data of processes lie in one folder, since tests run in many
coverage: export ADAPTDL_COVERAGE := $(CURDIR)/$(VENV)/coverage
coverage: $(STAMP) ## SUITES="--once --rest": product lines that no test runs, processes included
	@rm -rf "$$ADAPTDL_COVERAGE" && mkdir "$$ADAPTDL_COVERAGE"
	@for suite in $(or $(SUITES),--once --rest); do \
		$(BIN)/python -m coverage run --rcfile=tests/coverage.cfg -m pytest $$suite -n 3 --dist worksteal || true; done
	@$(BIN)/python -m coverage combine --rcfile=tests/coverage.cfg -q
	@$(BIN)/python -m coverage report --rcfile=tests/coverage.cfg

figures: $(STAMP) ## benchmarks/README.md: measure its rows again, in a quarter of an hour; what needs a GPU or hours is named
	@$(BIN)/python benchmarks/figures.py --measure

docs: $(STAMP) ## the site in site/, and the picture in docs/contributing/architecture.md from the imports
	@$(BIN)/python docs/generate_picture.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist: $(STAMP) ## dist/: a wheel, and a source distribution with docs, tests and benchmarks
	@rm -rf dist
	@$(BIN)/python -m build -q .
	@ls dist

lint: $(STAMP) ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

quick: $(STAMP) ## the short tests that start no process, in about two minutes
	@$(BIN)/python -m pytest --quick -n 2 --dist worksteal

# three at a time on two cores, because processes of the end-to-end tests wait a part of the time; both end with
# what they cost in CPU seconds
test: lint ## every feature once, on real processes and a real etcd, in about ten minutes on two cores
	@$(BIN)/python -m pytest --once -n 3 --dist worksteal

test-all: $(STAMP) ## the rest: faults, long waits, every case
	@$(BIN)/python -m pytest --rest -n 4 --dist worksteal

INTEGRATIONS := .venv-integrations
REQUIRED     := tests/integrations/requirements.txt tests/integrations/constraints.txt

$(INTEGRATIONS)/.installed: setup.cfg $(REQUIRED) | $(BIN)/python
	@echo "installing into $(INTEGRATIONS), 1 of 2: torch (200 MB without CUDA, several GB with it) ..."
	@$(BIN)/python -m venv $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/python $(PIP) -c tests/integrations/constraints.txt torch
	@echo "installing into $(INTEGRATIONS), 2 of 2: this package, and the frameworks ..."
	@$(INTEGRATIONS)/bin/python $(PIP) -c tests/integrations/constraints.txt \
		-r tests/integrations/requirements.txt -e .
	@touch $@

install-integrations: $(INTEGRATIONS)/.installed ## a virtual environment with the packages of others

test-integrations: $(INTEGRATIONS)/.installed ## the tests with packages of others (torchdata, datasets, transformers, accelerate, lightning), and of the page in a browser
	@$(INTEGRATIONS)/bin/python -m pytest tests/integrations -n 3 --dist worksteal --durations=10

slurm-test: $(STAMP) ## batch jobs on three nodes of a real Slurm (as root; apt-get install slurmctld slurmd slurm-client munge)
	@$(BIN)/python -m pytest tests/slurm

rooms: $(STAMP) ## tests that touch files, users, clocks and terminals in rooms unlike this one (as root)
	@$(BIN)/python tests/support/rooms.py

# PYTHON-TORCH. What has passed is written into tests/versions.csv, and setup.cfg claims no more. The first one has the
# lowest version of everything else, too, that setup.cfg allows. An environment is 7 GB where torch is a CUDA build, so it
# is removed when its tests have passed; KEEP=1 keeps it.
MATRIX := 3.11-2.8.0 3.11-2.9.1 3.11-2.11.0 3.11-2.13.0 3.11-2.14.1 3.10-2.13.0 3.12-2.13.0 3.13-2.13.0

matrix: $(addprefix matrix-,$(MATRIX)) ## quick tests and rescales on several Pythons and torches (pythonX.Y on the PATH)

matrix-%: .venv-matrix/%/.installed
	@echo "Python and torch $*:"
	@.venv-matrix/$*/bin/python -m pytest -q --quick -n 2 --dist worksteal
	@.venv-matrix/$*/bin/python -m pytest -q tests/end_to_end/test_rescale.py
	@.venv-matrix/$*/bin/python -m pytest -q -n 2 tests/rendezvous/test_torchrun*.py
	@$(if $(filter $(firstword $(MATRIX)),$*),.venv-matrix/$*/bin/python tests/support/torch_names.py)
	@.venv-matrix/$*/bin/python tests/support/record_version.py
	@$(if $(KEEP),,rm -rf .venv-matrix/$*)

.PRECIOUS: .venv-matrix/%/.installed
.venv-matrix/%/.installed: setup.cfg
	@python$(firstword $(subst -, ,$*)) -m venv --clear $(@D)
	@echo "torch==$(lastword $(subst -, ,$*))" > $(@D)/constraints.txt
	@$(if $(filter $(firstword $(MATRIX)),$*),sed -nE '/extras_require/q; s/^ +([^ ]+) >= /\1==/p' setup.cfg >> $(@D)/constraints.txt)
	@$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt torch
	@$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt -e '.[dev]'
	@touch $@

clean: ## remove what was built here
	rm -rf $(VENV) $(INTEGRATIONS) .venv-matrix build site dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .demo .cluster-demo .team-demo .ec2-demo .slurm-demo .hypothesis .import_linter_cache
