# make serve: run the embedded model's server.  make test: prove it.  Both build .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install serve test check format train
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev,bench]'
	touch $@

serve: install
	$(BIN)/outrider serve --config configs/embedded.yaml $(ARGS)

test: install
	$(BIN)/pytest $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

train: install
	$(BIN)/python -m models.train $(ARGS)
