# The two commands: `make demo` and `make test`. Both set up .venv first, once.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready-$(shell cat requirements-cpu.lock pyproject.toml 2>/dev/null | sha256sum | cut -c1-12)
TRAINERS := tests/trainers/requirements.txt
TRAINERS_READY := .venv-trainers/.ready-$(shell cat $(TRAINERS) 2>/dev/null | sha256sum | cut -c1-12)

# Nothing is fetched at run time, and a private cluster of this user needs no token.
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0
# Serve looks at its replicas, and exports what it counts, ten times a second by default: on a small machine the engines
# feel it.
export RAY_SERVE_CONTROL_LOOP_INTERVAL_S := 0.5
export RAY_SERVE_METRICS_EXPORT_INTERVAL_MS := 2000
# Ray passes what is larger than 100 kB through its object store, which costs more than to send a shard along.
export RAY_max_direct_call_object_size := 1048576

.PHONY: help setup demo distil test test-cluster test-outside test-parity test-faults test-trainers trainers fuzz bench lint serve lock clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## the virtual environment, locked (a few minutes the first time)

$(READY): requirements-cpu.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed ($(PYTHON) is not found; PYTHON=... names another)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Python 3.11 is needed; $(PYTHON) is another version"; exit 1; }
	@[ -x $(BIN)/python ] || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing the locked requirements (about 4 GB; a few minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements-cpu.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f .venv/.ready-* && touch $@

demo: setup  ## the main job: start the service, score two answers three ways, draw them (MODEL=path for another teacher)
	@$(BIN)/python -m examples.demo $(if $(MODEL),--model "$(MODEL)")

distil: setup  ## a student learns from the service (8 minutes; SHUFFLED=1: its control; TINY=1: a minute; SMALL=1: 15; FRESH=1 begins anew)
	@$(BIN)/python -m examples.on_policy_distillation $(if $(TINY),--tiny) $(if $(SMALL),--small) $(if $(SHUFFLED),--shuffled) $(if $(FRESH),--fresh)

test: setup  ## the tests (under 10 minutes)
	@$(BIN)/python -m pytest

test-cluster: setup  ## shapes of replicas on a pretend cluster, and LoRA adapters (2 minutes)
	@$(BIN)/python -m pytest tests/cluster

test-outside: setup  ## who comes from outside: tokens, limits, nginx in front, the command line (3 minutes)
	@$(BIN)/python -m pytest tests/outside

test-parity: setup  ## the same requests to vLLM's own server and to this service (2 minutes)
	@$(BIN)/python -m pytest tests/parity

test-faults: setup  ## kills and stops every process of a service under load, grows and shrinks it, changes its weights (about 25 minutes)
	@$(BIN)/python -m pytest tests/faults/test_autoscaling.py -s
	@$(BIN)/python -m pytest tests/faults/test_faults.py -s
	@$(BIN)/python -m pytest tests/faults/test_weights.py -s

test-trainers: trainers  ## the drop-ins under the code of TRL and verl (2 minutes)
	@.venv-trainers/bin/python -m pytest tests/trainers

trainers: setup $(TRAINERS_READY)  ## the environment of test-trainers: TRL and verl, on top of .venv

$(TRAINERS_READY): $(TRAINERS)
	@rm -rf .venv-trainers && $(BIN)/python -m venv .venv-trainers
	@.venv-trainers/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $(TRAINERS)
	@echo "import site; site.addsitedir('$(CURDIR)/.venv/lib/python3.11/site-packages')" \
		> .venv-trainers/lib/python3.11/site-packages/under.pth
	@ln -s ../../$(BIN)/serve .venv-trainers/bin/serve  # the service runs in the environment below
	@touch $@

fuzz: setup  ## strangers at the HTTP door: Schemathesis and Atheris, FUZZ_SECONDS each (20; 90 s in all), from FUZZ_SEED (1)
	@$(BIN)/python -m pytest tests/fuzz

bench: setup  ## how fast it is, as ratios in one table, out/bench.json and out/bench.png (20 minutes; QUICK=1: 4)
	@$(BIN)/python -m benchmarks.speed $(if $(QUICK),--quick)

lint: setup  ## style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

serve: setup  ## the service, in the foreground, on 127.0.0.1:8000
	@$(BIN)/python -c "import socket, sys, yaml; at = yaml.safe_load(open('serve_config.yaml'))['http_options']; socket.socket().connect_ex((at['host'], at['port'])) or sys.exit(f'{at[\"host\"]}:{at[\"port\"]} is taken, and Serve would share it with whoever answers there: end that, or change http_options.port in serve_config.yaml')"
	@$(BIN)/serve run serve_config.yaml

lock: setup  ## renew requirements-cpu.lock
	@$(BIN)/python .ci/lock.py > requirements-cpu.lock.new && mv requirements-cpu.lock.new requirements-cpu.lock

clean:  ## remove the virtual environment and what runs left behind
	rm -rf .venv .venv-trainers out
