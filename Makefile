# make serve: serve the embedded model.  make test: run the tests.  make soak: run the slow tests.  make agents: run coding agents
# against the server.  make browser: test the page in Chromium.  make ray: test a Ray cluster.  Each builds .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PLAYWRIGHT := .venv/.installed-browser
RAY := .venv/.installed-ray

.PHONY: install serve test soak browser ray agents check format train
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev,bench]'
	touch $@

serve: install
	$(BIN)/outrider serve --config configs/embedded.yaml $(ARGS)

# A process per core, at most 4; --dist loadgroup keeps the tests of one server in one process (tests/conftest.py).
test: install
	$(BIN)/pytest -m 'not slow and not browser and not ray' -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder $(ARGS)

soak: install
	$(BIN)/pytest -m slow $(ARGS)

# Skipped without Chromium (`apt-get install chromium`).
browser: $(PLAYWRIGHT)
	$(BIN)/pytest -m browser $(ARGS)

$(PLAYWRIGHT): $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[browser]'
	touch $@

# Several Ray nodes on this machine, in about 3 GB of memory.
ray: $(RAY)
	$(BIN)/pytest -m ray $(ARGS)

$(RAY): $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[ray]'
	touch $@

# Needs npm and a network.
agents: install
	$(BIN)/python -m bench.agents $(ARGS)

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
