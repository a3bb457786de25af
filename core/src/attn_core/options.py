"""What a user may ask for: one table of options with the names of the field's usual flags.

The command line, the Python API and the plan's record of itself all read this table. An unknown option is an error that
names the nearest ones; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from attn_core.dtypes import canonical
from attn_core.errors import UsageError

#: What may serve a phase: a backend name, ``name:variant``, or a map from group name or kind to one of these.
BackendChoice = str | Mapping[str, str] | None


def _option(default: Any, help_text: str, *, choices: tuple[str, ...] = (), form: str = "text") -> Any:
    meta = {"help": help_text, "choices": choices, "form": form}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Options:
    """The user's options. ``None`` and ``auto`` mean: decide for me. See each field's ``help`` metadata."""

    # who serves
    attention_backend: BackendChoice = _option(
        None, "backend of all attention layers; NAME, NAME:VARIANT or GROUP=NAME,GROUP=NAME", form="choice"
    )
    prefill_attention_backend: BackendChoice = _option(
        None, "backend of prefill; inherits --attention-backend", form="choice"
    )
    decode_attention_backend: BackendChoice = _option(
        None, "backend of decode; inherits --attention-backend", form="choice"
    )
    mm_attention_backend: BackendChoice = _option(None, "backend of vision towers and encoders", form="choice")
    linear_attn_backend: str | None = _option(None, "backend of linear-attention (GDN) layers")
    linear_attn_prefill_backend: str | None = _option(None, "GDN prefill backend; inherits --linear-attn-backend")
    linear_attn_decode_backend: str | None = _option(None, "GDN decode backend; inherits --linear-attn-backend")
    dsa_prefill_backend: str | None = _option(None, "sparse-attention sub-backend of prefill")
    dsa_decode_backend: str | None = _option(None, "sparse-attention sub-backend of decode")
    draft_attention_backend: BackendChoice = _option(
        None, "backend of the draft model; never inherited from the target", form="choice"
    )
    exclude_backends: tuple[str, ...] = _option((), "backends, or kind/name, that may not be chosen", form="names")
    prefer_backends: tuple[str, ...] = _option((), "backends to rank first under auto, in this order", form="names")
    disable_variants: tuple[str, ...] = _option((), "variants (name:variant) that may not be chosen", form="names")
    backend_options: Mapping[str, Mapping[str, Any]] = _option(
        {}, "options of one backend: NAME.KEY=VALUE, checked by its own schema", form="map"
    )
    allow_planned: bool = _option(False, "take backends into account whose kernels are only planned", form="flag")
    allow_experimental: bool = _option(False, "let auto choose experimental backends", form="flag")
    # memory
    dtype: str = _option("auto", "model dtype; auto: what the config says, else bfloat16")
    kv_cache_dtype: str = _option("auto", "element type of the KV cache; auto: the model's dtype")
    kv_layout: str | None = _option(None, "layout of the KV cache", choices=("NHD", "HND"))
    page_size: int | None = _option(None, "tokens in one page of the main pool", form="number")
    num_pages: int | None = _option(None, "pages in the main pool (checks address ranges)", form="number")
    mamba_ssm_dtype: str | None = _option(None, "dtype of recurrent states; auto: what the config says")
    shared_allocation: bool = _option(False, "KV pages and recurrent states come from one allocation", form="flag")
    page_major: bool = _option(False, "page-major KV layout", form="flag")
    hicache: bool = _option(False, "hierarchical cache", form="flag")
    disable_prefix_cache: bool = _option(False, "no prefix caching", form="flag")
    disable_chunked_prefix_cache: bool = _option(False, "no chunked attention over a cached prefix (MLA)", form="flag")
    # batching
    chunked_prefill_size: int | None = _option(8192, "tokens of a prefill chunk; -1 off", form="number")
    max_prefill_tokens: int | None = _option(None, "most tokens of one prefill step", form="number")
    context_length: int | None = _option(None, "longest context; default: the model's", form="number")
    max_running_requests: int | None = _option(None, "most rows of one step", form="number")
    dynamic_chunking: bool = _option(False, "dynamic chunking of prefill", form="flag")
    async_schedule: bool = _option(False, "overlap scheduling", form="flag")
    lanes: int = _option(1, "batches in flight at once", form="number")
    host_lengths: str = _option(
        "exact", "what the server knows of lengths on the host when a step begins", choices=("exact", "bound")
    )
    # speculation
    speculative_algorithm: str | None = _option(None, "EAGLE, EAGLE3, NEXTN, NGRAM, STANDALONE, …")
    speculative_eagle_topk: int = _option(1, "draft tokens sampled per step; above 1 is a tree", form="number")
    speculative_num_draft_tokens: int = _option(4, "draft tokens verified per row", form="number")
    speculative_num_steps: int = _option(3, "draft steps", form="number")
    speculative_attention_mode: str = _option(
        "prefill", "which phase's backend serves target verify", choices=("prefill", "decode")
    )
    # system
    tp_size: int = _option(1, "tensor-parallel ranks", form="number")
    dcp_size: int = _option(1, "decode context-parallel ranks", form="number")
    pd_role: str = _option("both", "role of this node", choices=("both", "prefill", "decode"))
    deterministic: bool = _option(False, "batch-invariant results", form="flag")
    cuda_graph: str = _option("auto", "graph capture", choices=("auto", "full", "decode", "piecewise", "off"))
    forbid_jit: bool = _option(False, "no backend that compiles at first use", form="flag")

    @classmethod
    def of(cls, values: Mapping[str, Any] | Options | None = None, **more: Any) -> Options:
        """Options from a mapping and keywords, names with ``-`` or ``_``. Raises :class:`UsageError` for unknown ones."""
        if isinstance(values, Options):
            values = {f.name: getattr(values, f.name) for f in fields(values)}
        merged = {name.replace("-", "_"): value for name, value in {**(values or {}), **more}.items()}
        known = {f.name: f for f in fields(cls)}
        clean: dict[str, Any] = {}
        for name, value in merged.items():
            if name not in known:
                raise UsageError(f"unknown option {name!r}", fix=nearest(name, known))
            if value is not None or name in ("page_size", "chunked_prefill_size"):
                clean[name] = _check(name, value, known[name].metadata)
        return cls(**clean)

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values: what the plan records."""
        found: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            default = f.default if f.default is not MISSING else {}
            if value != default:
                found[f.name] = list(value) if isinstance(value, tuple) else _copy(value)
        return found

    def but(self, **values: Any) -> Options:
        """These options with some of them changed, as they are: nothing is checked again."""
        return replace(self, **values)

    @property
    def topk(self) -> int:
        """Speculative topk; 0 without speculation."""
        return self.speculative_eagle_topk if self.speculative_algorithm else 0

    def flag_of(self, name: str) -> str:
        """The flag of an option, as the user writes it."""
        return "--" + name.replace("_", "-")


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def nearest(name: str, known: Mapping[str, Any] | tuple[str, ...] | list[str]) -> str:
    """``did you mean …`` with the nearest known names, or the whole list when none is near."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(known), n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(known))}"


def _check(name: str, value: Any, meta: Mapping[str, Any]) -> Any:
    form, choices = meta["form"], meta["choices"]
    flag = "--" + name.replace("_", "-")
    if form == "number" and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UsageError(f"{flag}: {value!r} is not a whole number")
    if form == "flag" and not isinstance(value, bool):
        raise UsageError(f"{flag}: {value!r} is not true or false")
    if form == "names":
        names = [value] if isinstance(value, str) else list(value)
        return tuple(part.strip() for item in names for part in str(item).split(",") if part.strip())
    if form == "choice":
        return parse_choice(value, flag)
    if choices and value not in choices:
        raise UsageError(f"{flag}: {value!r} is not one of {', '.join(choices)}")
    if name in ("dtype", "kv_cache_dtype", "mamba_ssm_dtype") and value != "auto":
        return canonical(str(value))
    least = {"chunked_prefill_size": -1}.get(name, 1)
    if form == "number" and value is not None and value < least:
        raise UsageError(f"{flag}: {value} is below {least}")
    return value


def parse_choice(value: Any, flag: str) -> BackendChoice:
    """``"triton"``, ``"full=triton,sliding=flashinfer"`` or a mapping of that form."""
    if isinstance(value, Mapping):
        return {str(key): str(item) for key, item in value.items()}
    if not isinstance(value, str) or not value:
        raise UsageError(f"{flag}: {value!r} is not a backend name or a GROUP=NAME map")
    if "=" not in value:
        return value
    pairs = {}
    for part in value.split(","):
        group, equals, name = part.partition("=")
        if not equals or not group.strip() or not name.strip():
            raise UsageError(f"{flag}: {part!r} is not GROUP=NAME")
        pairs[group.strip()] = name.strip()
    return pairs


def named_backends(options: Options) -> Iterator[tuple[str, str]]:
    """Every backend the user named explicitly, as (flag, name without variant)."""
    for f in fields(options):
        if not f.name.endswith(("_backend",)):
            continue
        value = getattr(options, f.name)
        for name in value.values() if isinstance(value, Mapping) else [value] if value else []:
            yield options.flag_of(f.name), name.partition(":")[0]
