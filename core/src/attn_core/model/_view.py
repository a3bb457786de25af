"""Typed look-ups in a model configuration: several spellings, defaults of the model family, clear errors.

A :class:`View` stacks three sources, the first that states a key wins: values settled by a family's rule, the
configuration itself, and the defaults that Hugging Face's class for that ``model_type`` would fill in (a stored
``config.json`` leaves out whatever equals the default). An explicit ``null`` in the configuration hides the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.errors import ModelError

#: Spellings of the same quantity, most specific first. Readers look these up and nothing else.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers", "num_blocks")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "kv_heads")
HIDDEN = ("hidden_size", "d_model", "n_embd", "n_embed", "model_dim", "dim", "embed_dim", "emb_dim", "width")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size", "local_window_size")
CHUNK = ("attention_chunk_size",)
MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "n_mtp_layers", "mtp_num_layers")
POSITIONS = (
    "max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "max_seq_len",
    "seq_length", "n_ctx", "model_max_length", "context_length",
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """One configuration dictionary, read with rules. ``where`` is its place in the whole (``text_config``)."""

    data: Mapping[str, Any]
    kind: str
    where: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settled: Mapping[str, Any] = field(default_factory=dict)
    #: Defaults that were really needed, by key; shared by all views derived from one another.
    assumed: dict[str, Any] = field(default_factory=dict)

    def settle(self, values: Mapping[str, Any]) -> View:
        """A view in which `values` win over everything read so far."""
        return replace(self, settled={**self.settled, **values}) if values else self

    def get(self, *names: str) -> Any:
        """The first stated value among `names`; None if nothing or ``null`` is stated."""
        for source in (self.settled, self.data):
            stated = [name for name in names if name in source]
            for name in stated:
                if source[name] is not None:
                    return source[name]
            if stated:
                return None
        for name in names:
            if self.defaults.get(name) is not None:
                self.assumed[name] = self.defaults[name]
                return self.defaults[name]
        return None

    def states(self, *names: str) -> bool:
        """Whether the configuration itself (not a default) gives one of `names` a value."""
        return any(self.settled.get(name, self.data.get(name)) is not None for name in names)

    def integer(self, *names: str) -> int | None:
        """A whole number or None. Raises :class:`ModelError` for anything else (``true``, text, 1.5)."""
        value = self.get(*names)
        if value is None:
            return None
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise self.error(f"{names[0]} is {value!r}, a whole number is needed")
        return int(value)

    def need(self, *names: str) -> int:
        """A positive whole number. Raises :class:`ModelError` when it is missing, zero or negative."""
        value = self.integer(*names)
        if value is None:
            raise self.error(f"{names[0]} is missing", f"also looked for {', '.join(names[1:]) or 'nothing else'}")
        if value <= 0:
            raise self.error(f"{names[0]} is {value}, a positive number is needed")
        return value

    def number(self, *names: str) -> float | None:
        """A number or None. Raises :class:`ModelError` for anything else."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{names[0]} is {value!r}, a number is needed")
        return float(value)

    def flag(self, *names: str) -> bool | None:
        """True, False, or None when nothing is stated. Text counts as true, as in Python."""
        value = self.get(*names)
        return None if value is None else bool(value)

    def text(self, *names: str) -> str | None:
        """Text or None."""
        value = self.get(*names)
        return None if value is None else str(value)

    def items(self, *names: str) -> list[Any] | None:
        """A list or None. Raises :class:`ModelError` for anything else."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.error(f"{names[0]} is {value!r}, a list is needed")
        return list(value)

    def table(self, *names: str) -> Mapping[str, Any]:
        """A nested dictionary, empty when nothing is stated."""
        value = self.get(*names)
        return value if isinstance(value, Mapping) else {}

    def call(self, name: str) -> Callable[..., Any] | None:
        """A function that a rule left under `name`."""
        value = self.settled.get(name)
        return value if callable(value) else None

    def error(self, message: str, *facts: str) -> ModelError:
        """A :class:`ModelError` that says which part of which configuration it is about."""
        place = f"{self.where}: " if self.where else ""
        return ModelError(f"{self.kind or 'model'}: {place}{message}", *facts)
