"""The public entry: a configuration becomes a :class:`~attn_core.geometry.Model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import ModelError
from attn_core.geometry import LayerGroup, Model
from attn_core.model import _families, _families_encoders, _families_mixed, _outside  # noqa: F401  (they register)
from attn_core.model._compose import compose, root
from attn_core.model._groups import gather, traits
from attn_core.model._source import Source, load
from attn_core.model._states import short_dtype
from attn_core.model._view import MTP, POSITIONS, View


def parse_model(source: Source) -> Model:
    """Read a model: a config.json, a folder with one, a ``.gguf`` file, a dictionary, or anything with ``to_dict()``.

    Head counts are the whole model's (:meth:`Model.shard` divides them); windows count the query's own position;
    scales are those of the family's own code. Raises :class:`~attn_core.errors.ModelError` when the configuration is
    broken, is no attention model, or belongs to an architecture that is not known and not plain.
    """
    config, name = load(source)
    view = root(config)
    try:
        parts = compose(view)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{view.kind or 'model'}: a value of the configuration has no usable form: {error}") from error
    if not parts.layers:
        raise ModelError(f"{view.kind or 'this configuration'} is not an attention model: it has no layers to plan")
    groups = gather(parts.layers)
    return Model(
        name=name or str(config.get("_name_or_path") or "") or view.kind or "model",
        architecture=_architecture(config, parts.main),
        model_type=str(config.get("model_type") or parts.main.kind),
        dtype=short_dtype(parts.main.get("@dtype", "torch_dtype", "dtype")),
        groups=groups,
        layers_counted=_count(groups),
        traits=traits(groups),
        max_positions=parts.main.integer(*POSITIONS),
        mtp_layers=_drafts(parts.main) or _drafts(view),
        notes=tuple(parts.notes),
    )


def _drafts(view: View) -> int:
    """Draft layers as the configuration states them: a class default says nothing about the checkpoint's weights."""
    return max(view.integer(*MTP) or 0, 0) if view.states(*MTP) else 0


def _architecture(config: Mapping[str, Any], main: View) -> str:
    for source in (config, main.data):
        names = source.get("architectures")
        if isinstance(names, (list, tuple)) and names:
            return str(names[0])
    return str(config.get("model_type") or main.kind)


def _count(groups: tuple[LayerGroup, ...]) -> int:
    """Layers of the language model; of the encoder or tower when there is no other part."""
    for model in ("target", "encoder", "vision"):
        layers = {layer for group in groups if group.model == model for layer in group.layers}
        if layers:
            return len(layers)
    return 0
