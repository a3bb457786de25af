"""``attn new``: a complete plugin package from templates, which passes its own tests as generated."""

from __future__ import annotations

import re
from pathlib import Path

from attn_core.errors import UsageError

#: Template file -> path in the new package.
_FILES = {
    "pyproject.toml.j2": "pyproject.toml",
    "README.md.j2": "README.md",
    "CHANGELOG.md.j2": "CHANGELOG.md",
    "gitignore.j2": ".gitignore",
    "workflows/test.yml.j2": ".github/workflows/test.yml",
    "src/init.py.j2": "src/{package}/__init__.py",
    "src/backend.py.j2": "src/{package}/backend.py",
    "src/attn_manifest.toml.j2": "src/{package}/attn_manifest.toml",
    "tests/test_conformance.py.j2": "tests/test_conformance.py",
}
#: Kinds for which there is a working template.
KINDS = ("mha",)


def create(name: str, kind: str, folder: Path) -> list[Path]:
    """Write a package for a backend called `name` into ``folder/attn-name`` and return its files.

    Raises :class:`UsageError` for a name that cannot be one or is taken, a kind without a template, or a folder that is
    not empty or cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if kind not in KINDS:
        raise UsageError(f"--kind {kind!r}: there is no template for it yet", fix=f"known are {', '.join(KINDS)}")
    values = _values(name, kind)
    target = folder / values["dist"]
    if target.is_file() or (target.exists() and any(target.iterdir())):
        raise UsageError(f"{target}: exists and is not an empty folder", fix="choose another name or --folder")
    environment = Environment(
        loader=PackageLoader("attn_core", "templates/plugin"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # source code, not HTML
    )
    texts = {
        place.format(**values): environment.get_template(source).render(values) for source, place in _FILES.items()
    }
    texts[f"src/{values['package']}/py.typed"] = ""
    try:
        return [_write(target / place, text) for place, text in texts.items()]
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error}", fix="choose another --folder") from error


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _values(name: str, kind: str) -> dict[str, str]:
    """What the templates need. ``Fast-Attn`` becomes backend ``fast_attn``, distribution ``attn-fast-attn``."""
    short = name.strip().lower().replace("-", "_").removeprefix("attn_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", short):
        raise UsageError(
            f"{name!r} cannot be a backend's name",
            fix="letters and digits in words joined by '-', such as fast-kernels",
        )
    import importlib_metadata

    from attn_core import API_VERSION

    dist, package = f"attn-{short.replace('_', '-')}", f"attn_{short}"
    _refuse_taken(short, dist, package)
    major, minor, *_ = importlib_metadata.version("attn-core").split(".")
    return {
        "name": short,
        "kind": kind,
        "dist": dist,
        "package": package,
        "api": API_VERSION,
        "core_version": f"{major}.{minor}",
        "core_below": f"{major}.{int(minor) + 1}" if major == "0" else str(int(major) + 1),
    }


def _refuse_taken(short: str, dist: str, package: str) -> None:
    """A package that would shadow another one, or a backend of a published name, only makes trouble later."""
    from importlib.util import find_spec

    from attn_core.manifest import load_toml

    directory = load_toml(Path(__file__).with_name("directory.toml").read_text(encoding="utf-8"), "directory.toml")
    known = directory.get("backends", {})
    if short in known or dist in {entry["distribution"] for entry in known.values()}:
        raise UsageError(f"{short!r} is the name of a published backend or package", fix="choose a name of your own")
    if find_spec(package) is not None:
        raise UsageError(f"a package {package} is installed already", fix="choose another name, or uninstall it first")
