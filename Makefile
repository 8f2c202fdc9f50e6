# Quant Loader: the commands of the README. Each sets up what it needs; the first takes minutes, later ones seconds.

PYTHON ?= python3
PORT ?=

ifeq ($(OS),Windows_NT)
VENV_BIN := .venv/Scripts
else
VENV_BIN := .venv/bin
endif
# -I keeps this folder off sys.path: the pack is imported as quant_loader, as it is installed.
RUN := $(VENV_BIN)/python -I -m

# mypy reads the rooms as what they are once installed: parts of the package quant_loader.
TYPED := $(foreach room,checkpoint kernels patching nodes automation cli,-p quant_loader.$(room))

.PHONY: demo serve test lint lint-js bench fuzz clean setup help

help:
	@echo "make demo    tiny quantised models through a real ComfyUI: pictures, a table, two refusals"
	@echo "make serve   the same server left up, with a workflow in the editor (PORT=8188)"
	@echo "make test    every test, the end-to-end ones against a real ComfyUI server included"
	@echo "make lint    ruff and mypy (make lint-js: the browser modules, with Node.js)"
	@echo "make bench   side by side with the stock loader: benchmarks/RESULTS.md (NAMES=\"faults load\", FULL=1)"
	@echo "make fuzz    the check against hostile files, each strategy for SECONDS=600"
	@echo "make clean   removes what the commands made (.venv, .cache, demo-output)"

setup:
	@$(PYTHON) demo/setup_env.py

demo: setup
	@$(RUN) quant_loader.demo.run $(if $(PORT),--port $(PORT))

serve: setup
	@$(RUN) quant_loader.demo.run --serve $(if $(PORT),--port $(PORT))

test:
	@$(PYTHON) demo/setup_env.py --tests
	$(VENV_BIN)/pytest $(PYTEST_ARGS)

lint: setup
	$(VENV_BIN)/ruff check .
	$(VENV_BIN)/ruff format --check .
	@mkdir -p .cache/types && ln -sfn ../.. .cache/types/quant_loader
	cd .cache/types && MYPYPATH=. ../../$(VENV_BIN)/mypy --config-file ../../pyproject.toml $(TYPED)

# Needs Node.js; the modules have no build step and are tested in a browser by `make test`.
lint-js:
	npm install --prefix .cache/js --no-audit --no-fund --silent eslint@10
	.cache/js/node_modules/.bin/eslint -c web/eslint.config.mjs web

bench: setup
	$(RUN) quant_loader.benchmarks.run $(NAMES) $(if $(FULL),--full)

fuzz: setup
	QUANT_LOADER_FUZZ_SECONDS=$(or $(SECONDS),600) $(VENV_BIN)/pytest tests/hostile/test_fuzz.py --timeout=0 $(PYTEST_ARGS)

clean:
	rm -rf .venv .cache demo-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
