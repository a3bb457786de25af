"""Where a model comes from: a file, a folder, a dictionary or a configuration object, as one plain dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attn_core.errors import ModelError


@runtime_checkable
class ConfigLike(Protocol):
    """Anything with ``to_dict()``: a transformers ``PretrainedConfig``."""

    def to_dict(self) -> Mapping[str, Any]:
        """The configuration as a dictionary."""


#: What :func:`attn_core.model.parse_model` takes.
Source = str | Path | Mapping[str, Any] | ConfigLike


def load(source: Source) -> tuple[Mapping[str, Any], str | None]:
    """(configuration, name or None). Raises :class:`ModelError` for what is no configuration."""
    if isinstance(source, Mapping):
        return _unwrap(source, None)
    if isinstance(source, ConfigLike) and not isinstance(source, (str, Path)):
        config = source.to_dict()
        name = getattr(source, "_name_or_path", None) or config.get("_name_or_path")
        return config, str(name) if name else None
    if isinstance(source, (str, Path)):
        return _read(Path(source).expanduser())
    raise ModelError(f"a model is a path, a dictionary or a configuration object, not {type(source).__name__}")


def _read(path: Path) -> tuple[Mapping[str, Any], str | None]:
    if path.is_dir():
        inner = path / "config.json"
        if not inner.is_file():
            raise ModelError(
                f"{path} holds no config.json", fix="give the folder of a downloaded model, or its config.json"
            )
        return _unwrap(_json(inner), path.resolve().name)
    if not path.is_file():
        raise ModelError(
            f"no such model file or folder: {path}",
            "a name on the Hugging Face hub is not downloaded here",
            fix="give a config.json, a folder holding one, or a .gguf file",
        )
    if path.suffix.lower() == ".gguf":
        from attn_core.model._gguf import read_gguf

        return read_gguf(path), path.stem
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _unwrap(_json(path), name)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}, a configuration is a JSON object")
    return data


def _unwrap(data: Mapping[str, Any], name: str | None) -> tuple[Mapping[str, Any], str | None]:
    """A file that describes a model keeps its configuration under ``config`` and its name under ``slug``."""
    inner = data.get("config")
    if isinstance(inner, Mapping) and ("slug" in data or "derived" in data):
        return inner, str(data.get("slug") or name or "") or None
    return data, name
