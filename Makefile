# make serve: serve SmolLM2-135M-Instruct.  make test: run the tests.  make kernels: run those of what a GPU computes.
# make real: test the server with that model.  make models: fetch two more models, which the slow tests then use.
# make soak: run the slow tests.  make bounds: run tests with the oldest versions.  make browser: test the page in Chromium.
# make ray: test a Ray cluster.  make llama: test llama.cpp as the backend.
# make sanitize: test the compiled libraries with sanitizers.  make wheels: build what a release publishes.  make deb: and a Debian package.
# make bench-guard: what is slower than in the last release.  make llama-server: compile llama.cpp's programs, for comparisons.
# make clients: test with Ollama's clients and Helm.
# Each builds .venv first, but bounds one of its own; serve leaves out what only tests and PyTorch need.
PYTHON ?= python3
BIN := .venv/bin
SERVER := .venv/.installed-server
INSTALLED := .venv/.installed
PLAYWRIGHT := .venv/.installed-browser
RAY := .venv/.installed-ray
CLIENTS := .venv/.installed-clients
LLAMA := .venv/.installed-llama
KERNELS := tests/verify/model/gpu
RELEASE := .venv/.installed-release
BOUNDS := build/bounds
# mypy and editors do not read the finder of an editable install; they find the packages through these links.
LINKS := $(addprefix build/links/outrider/,server drafters verify models)

CPP := $(foreach folder,verify/model/cpu/native drafters/native verify/gguf/native,$(wildcard $(folder)/*.cpp $(folder)/*.h))

# A process per core, at most 4; --dist loadgroup keeps the tests of one server in one process (tests/conftest.py).
PARALLEL := $(BIN)/pytest -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
# Empty turns it off: each of the processes and servers of a test run would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install serve test kernels real models soak bounds browser clients ray llama sanitize wheels deb bench-guard llama-server check format
install: $(INSTALLED)

# Installs what projects need, and checks the hash of each file, also of what builds them.
define install_checked
mkdir -p build
$(BIN)/python requirements.py $1 > build/requirements.txt
$(BIN)/pip install --quiet --disable-pip-version-check --build-constraint constraints.txt -c constraints.txt \
    -r build/requirements.txt
endef

# What serves what the compiled library computes, without PyTorch.
$(SERVER): pyproject.toml setup.py constraints.txt $(CPP)
	$(PYTHON) -m venv .venv
	grep '^pip==' constraints.txt > .venv/pip.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/pip.txt
	$(call install_checked,.)
	$(BIN)/pip install --quiet --disable-pip-version-check --build-constraint constraints.txt --no-deps --editable .
	touch $@

# pip would leave out a build of torch in a folder of this machine's (its CPU build), as pip knows no hash of it before it is read.
$(INSTALLED): $(SERVER) bench/pyproject.toml
	grep -o '^torch==[^ ]*' constraints.txt > .venv/torch.txt
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest build/torch -r .venv/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-index --find-links build/torch -c constraints.txt torch
	rm -r build/torch
	$(call install_checked,'.[dev]' ./bench)
	$(BIN)/pip install --quiet --disable-pip-version-check --build-constraint constraints.txt --no-deps --editable ./bench
	touch $@

serve: $(SERVER)
	$(BIN)/outrider serve $(ARGS)

# Without a network, the tests with that model are skipped.
test: install
	-$(BIN)/outrider pull SmolLM2-135M-Instruct
	$(PARALLEL) -m 'not slow and not browser and not ray and not llama and not clients' --ignore=$(KERNELS) $(ARGS)

# Without a GPU, Triton's interpreter runs its kernels.
kernels: install
	$(PARALLEL) -m 'not slow' $(KERNELS) $(ARGS)

# All tests with SmolLM2-135M-Instruct; `make test` has the fast ones, and `make soak` the slow ones.
real: install
	$(BIN)/outrider pull SmolLM2-135M-Instruct
	$(PARALLEL) -m real $(ARGS)

# Two models that people know, 745 MB in ~/.cache/outrider/models; a third one is Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.
models: install
	$(BIN)/outrider pull gemma-3-270m-Q4_K_M
	$(BIN)/outrider pull Qwen2.5-Coder-0.5B-Instruct-Q4_K_M

# Those with a model that is not installed are skipped.
soak: install
	$(PARALLEL) -m slow $(ARGS)

# The oldest versions that pyproject.toml allows of what computes, and the packages that these need in other versions than ours.
OLDEST = $(shell grep -oE '"(torch|transformers|triton)>=[0-9.]+' pyproject.toml | sed -E 's/"(.*)>=(.*)/\1==\2.*/')
UNPINNED := ^(cuda-.*|filelock|fsspec|hf-xet|huggingface-hub|numpy|nvidia-.*|pip|setuptools|sympy|tokenizers|torch|transformers|triton)==

# The tests of what computes with the oldest versions, in an environment of their own. Triton 3.6 cannot interpret with NumPy 2.4,
# and warns with NumPy 2.3. transformers 5.17 does not read the MTP layers of Qwen, which the tests of heads need, and its Mamba and
# Jamba fail before we can say why we refuse them.
bounds: $(BOUNDS)/.installed
	$(BOUNDS)/bin/pytest -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder \
	    -W 'ignore:Conversion of an array with ndim:DeprecationWarning' \
	    -m 'not slow and not browser and not ray and not llama and not clients' --ignore tests/verify/heads \
	    --deselect tests/verify/model/test_architectures.py::test_an_unsupported_state_is_refused \
	    tests/verify tests/server/worker $(ARGS)

$(BOUNDS)/.installed: pyproject.toml setup.py bench/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BOUNDS)
	sed -nE '/$(UNPINNED)/d; s/^([^# ]+).*/\1/p' constraints.txt > $(BOUNDS)/constraints.txt
	$(BOUNDS)/bin/pip install --quiet --disable-pip-version-check -c $(BOUNDS)/constraints.txt $(OLDEST) "numpy<2.4" \
	    --editable '.[dev]' --editable ./bench
	touch $@

# Skipped without Chromium (`apt-get install chromium`).
browser: $(PLAYWRIGHT)
	$(BIN)/pytest -m browser $(ARGS)

$(PLAYWRIGHT): $(INSTALLED)
	$(call install_checked,'.[browser]')
	touch $@

# npm fetches three packages; skipped without it.
clients: $(CLIENTS)
	$(BIN)/outrider pull SmolLM2-135M-Instruct
	$(BIN)/pytest -m clients $(ARGS)

$(CLIENTS): $(INSTALLED)
	$(call install_checked,'.[clients]')
	touch $@

# Several Ray nodes on this machine, in about 3 GB of memory.
ray: $(RAY)
	$(BIN)/pytest -m ray $(ARGS)

# Compiles llama.cpp, which takes about four minutes.
llama: $(LLAMA)
	$(BIN)/outrider pull SmolLM2-135M-Instruct
	$(BIN)/pytest -m llama $(ARGS)

$(LLAMA): $(INSTALLED)
	$(call install_checked,'.[llama]')
	touch $@

$(RAY): $(INSTALLED)
	$(call install_checked,'.[ray]')
	touch $@

# The compiled libraries with the sanitizers of addresses and of undefined behaviour, in a copy of the sources; leaks are Python's.
SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1
sanitize: install
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)/links/outrider
	cp -r setup.py pyproject.toml README.md LICENSE server drafters verify models bench tests $(SANITIZED)
	find $(SANITIZED) -name '*.so' -delete
	for folder in server drafters verify models; do ln -s ../../$$folder $(SANITIZED)/links/outrider/; done
	cd $(SANITIZED) && CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" ../../$(BIN)/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && PYTHONPATH=links:. LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 ../../$(BIN)/pytest -p no:cacheprovider -m 'not slow' tests/verify/model/cpu tests/drafters $(ARGS)

# The wheels of the last commit, for x86-64 and aarch64, and what belongs to them, in dist.
wheels: $(RELEASE)
	PATH="$$PWD/$(BIN):$$PATH" python release/wheels.py

$(RELEASE): $(SERVER)
	$(call install_checked,'.[release]')
	touch $@

# A package for this machine's Debian (`apt-get install debhelper`), with all that it needs but Python.
deb: wheels
	PATH="$$PWD/$(BIN):$$PATH" release/deb.sh

# Ten minutes of figures beside the last release, or beside AGAINST, a commit or a wheel, which is compiled once in build/guard.
bench-guard: install
	$(BIN)/outrider pull SmolLM2-135M-Instruct
	$(BIN)/outrider bench guard $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

# llama.cpp's programs, for `outrider bench pair` and figures beside them, compiled for this machine once: ten minutes on two cores.
LLAMA_CPP := build/llama.cpp
llama-server: $(LLAMA_CPP)/build/bin/llama-server
$(LLAMA_CPP)/build/bin/llama-server: | $(SERVER)
	rm -rf $(LLAMA_CPP) && mkdir -p $(LLAMA_CPP)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --build-constraint constraints.txt \
	    -c constraints.txt --dest $(LLAMA_CPP) llama-cpp-python
	tar -xzf $(LLAMA_CPP)/*.tar.gz -C $(LLAMA_CPP) --strip-components 3 --wildcards '*/vendor/llama.cpp'
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF > $(LLAMA_CPP)/log
	cmake --build $(LLAMA_CPP)/build --parallel --target llama-server llama-bench llama-batched-bench llama-quantize

check: install $(LINKS)
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(LINKS):
	mkdir -p $(@D)
	ln -sfn ../../../$(@F) $@

format: install
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/ruff check --fix .
