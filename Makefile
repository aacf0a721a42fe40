# make demo   train a small llama3 on 4 CPU processes, then compare stock with lifecycle
# make check  run the tests without ranks, and a choice of those on small ranks, in minutes
# make test   run all tests
# make lint   check style, types and workflows
#
# Each sets up what it needs in .venv; PYTHON selects the interpreter that creates it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo check test lint clean

demo: $(VENV)/.installed
	@echo "demo: training configs/llama3_fsdp.toml on 4 processes; the demo takes two to three minutes in all"
	@$(BIN)/titan-lifecycle train configs/llama3_fsdp.toml
	@echo "demo: llama3_fsdp_accumulate, torchtitan's lifecycle (stock) against this one"
	@$(BIN)/titan-lifecycle report llama3_fsdp_accumulate --training.steps 4 --training.seq_len 64
	@echo "demo: TensorBoard's files are in outputs/llama3_fsdp/tb; the picture of what was compared"
	@echo "demo: is docs/backwards.svg"

check: $(VENV)/.installed-dev
	@echo "check: running pytest -m check"
	@$(BIN)/python -m pytest -m check

test: $(VENV)/.installed-dev
	@echo "test: running pytest"
	@$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	@echo "lint: ruff, mypy and actionlint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/actionlint -shellcheck=$(BIN)/shellcheck -pyflakes=

clean:
	rm -rf $(VENV) outputs

# The stamps are newer than what they were made from, so a second call goes straight on.
$(VENV)/.created:
	@echo "setup: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "setup: installing titan_lifecycle with torch and torchtitan, as pinned in constraints.txt"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "setup: installing the tools for tests and lint"
	@$(INSTALL) -e '.[dev,plot]'
	@touch $@
