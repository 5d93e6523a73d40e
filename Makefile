# Everything that a fresh machine with Python 3.11+ and make needs: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests start hundreds of processes: none of them compiles the same files again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-long test-drills test-drills-ranks test-frameworks test-engines test-watch \
  test-watch-drills test-watch-healthy test-oncall test-rough test-soak test-rdma test-rdma-short lint types unit docs \
  docs-test screenshots wheel bench lock audit fuzz clean

demo: $(STAMP)
	$(BIN)/lockstep bench --ps=1 --workers=2 --device=cpu --model=lenet --batch_size=64 --num_batches=100

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Two tests at a time: most of what clusters do in tests is waiting.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist=worksteal

# Real processes. Those marked timed get a second try (tests/helpers/second_try.py), and those marked alone have the
# machine to themselves.
SLOW := (slow or timed) and not (rdma or long or drill or soak or docs or wheel or watch or oncall)
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist=worksteal -m '$(SLOW) and not alone'
	$(BIN)/python -m pytest -q -m '$(SLOW) and alone'

# What is too long for every change: hundreds of drawn runs, ten kills in one run, every variant of what test-slow shows.
test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist=worksteal -m 'slow and long'

# transformers' Trainer, accelerate and Lightning, in an environment of their own above .venv's, whose torch they share.
FRAMEWORKS := .venv-frameworks
test-frameworks: $(FRAMEWORKS)/.installed
	PYTHONPATH=src OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -q -m slow tests/integrations

$(FRAMEWORKS)/.installed: $(STAMP) constraints.txt
	test -x $(FRAMEWORKS)/bin/python || $(BIN)/python -m venv $(FRAMEWORKS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(FRAMEWORKS)/bin/python -m pip install --quiet -c constraints.txt accelerate lightning transformers
	touch $@

# The documentation as a site, in build/site; strict about links, and nothing in it is loaded from elsewhere. Its tools
# have an environment of their own; once they are installed, no network is needed.
DOCS := .venv-docs
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict
	$(DOCS)/bin/python -m tools.site_check build/site

$(DOCS)/.installed: constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

# What the documents show, run as they show it: commands, programs and samples of output that take longer than a moment.
docs-test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist=worksteal -m docs tests/docs

# The wheel in a fresh environment, as a user has it: it runs the demo.
wheel: $(STAMP)
	$(BIN)/python -m pytest -q -m wheel tests/test_wheel.py

# Jobs on engines that people have, for real: Slurm, torchrun, Open MPI, as root on a Debian machine, which gets them
# installed; Ray. Of Kubernetes only the pods, in network namespaces, and the published schemas, in an environment above
# .venv's. Fails where they cannot be had.
ENGINES := .venv-engines
test-engines: $(ENGINES)/.installed
	LOCKSTEP_ENGINES=1 PYTHONPATH=src OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -q -m engine tests/engines

$(ENGINES)/.installed: $(STAMP) constraints.txt pyproject.toml
	test -x $(ENGINES)/bin/python || $(BIN)/python -m venv $(ENGINES)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(ENGINES)/bin/python -m pip install --quiet -c constraints.txt kubernetes-validate kubeflow-training \
	  kubeflow-trainer-api 'ray[default]'
	touch $@

# What people on call use, beside the real programs: Debian's packages prometheus and prometheus-alertmanager (the
# services that they install need not run), and chromium for the dashboard.
test-oncall: $(STAMP)
	$(BIN)/python -m pytest -q -rP -m oncall tests/oncall

# Every drill with servers; one per cause without servers and without sentences; then rough runs in which nothing may be
# said.
test-drills: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 -m 'drill and not alone and not ranks' tests/drill
	$(BIN)/python -m pytest -q -m 'drill and alone' tests/drill

# Every drill without servers; faults in programs of the library, with servers and without.
test-drills-ranks: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 -m 'drill and ranks' tests/drill
	$(BIN)/python -m pytest -q -m drill tests/library/test_faults.py

# The pictures of the dashboard in docs/images, from a simulated job and from a real one; needs Chromium.
screenshots: $(STAMP)
	$(BIN)/python -m tools.screenshots

# Only the runs in which nothing may be said: 2,000 rough steps, and 2,500 beside four busy loops. Three minutes in all,
# on a machine with nothing else to do.
test-rough: $(STAMP)
	$(BIN)/python -m pytest -q -m drill --durations=0 tests/drill/test_no_alarm.py

# Every fault in programs of others, DDP and FSDP2, under torchrun and lockstep watch; some of them use transformers.
test-watch: $(FRAMEWORKS)/.installed
	LOCKSTEP_FRAMEWORKS=$(CURDIR)/$(FRAMEWORKS)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
	  -m 'watch and not alone and not long' -rP tests/watch

# The same in the program of lockstep drill --system.
test-watch-drills: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'watch and long' -rP tests/watch

# 2,000 healthy steps, in the middle of which rank 0 evaluates for a minute: it computes, or waits; no verdict.
test-watch-healthy: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'watch and alone' tests/watch

# Every mis-configuration in network namespaces, transfers under random kills: for a quiet machine.
test-soak: $(STAMP)
	$(BIN)/python -m pytest -q -m soak

# grpc+verbs over a real (software) RDMA device, in virtual machines: as root on a Debian machine, which gets qemu
# installed. Kernel and disk image are kept in ~/.cache/lockstep-lab (LOCKSTEP_LAB).
test-rdma: $(STAMP)
	$(BIN)/python -m pytest -q -m rdma tests/rdma

# Without what takes longest: the conformance suites, and the training over gRPC with which bits are compared.
test-rdma-short: $(STAMP)
	$(BIN)/python -m pytest -q -m 'rdma and not slow' tests/rdma

bench: $(STAMP)
	$(BIN)/python bench/grpc_table.py
	$(BIN)/python bench/input_pipeline.py
	$(BIN)/python bench/image_libraries.py

# Only files whose hashes are in locks/ are installed, and nothing is looked up besides; pip check sees that nothing is
# missing. Of torch, a build in one of pip's find-links folders comes first: pip itself would prefer the index.
$(STAMP): pyproject.toml $(wildcard locks/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r locks/packages.txt
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --no-index -r locks/torch.txt 2> /dev/null || \
	  $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r locks/torch.txt
	if $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit("+cpu" in m.version("torch"))'; then \
	  $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r locks/torch-cuda.txt; fi
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $(STAMP)

# After a change of constraints.txt or of what pyproject.toml asks for.
lock: $(STAMP)
	$(BIN)/python -m tools.lock

# Own rules over the sources, then known advisories about the locked versions (needs the network).
audit: $(STAMP)
	$(BIN)/python -m tools.audit
	$(BIN)/python -m tools.advisories

# Mutated inputs for every parser and for the live ports of a small job.
FUZZ_SECONDS ?= 600
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds=$(FUZZ_SECONDS)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) $(ENGINES) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache \
	  .hypothesis
