"""Everything that can be wrong with a plugin: each fault is one visible problem, and the plugin beside it still works."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import pytest

import attn_core
from attn_core.discovery import Cause, PluginProblem, Registry, State, discover
from attn_core.errors import AttnError, BindError, PluginError, UsageError
from attn_core.platform import parse_platform
from toy_plugins import GOOD_CODE, Site, manifest_text, site

__all__ = ["site"]

CPU = parse_platform("cpu")


@pytest.fixture(autouse=True)
def good(site: Site) -> None:
    """Every fault stands beside a plugin that is in order."""
    site.add("attn-good", manifest_text("good"))


def good_works(registry: Registry) -> None:
    (manifest,) = (manifest for manifest in registry.manifests if manifest.name == "good")
    assert registry.probe(manifest, CPU)["default"].ok
    assert registry.create(manifest, "default", None).made_for == ("good", "default")  # type: ignore[arg-type]


def the_problem(registry: Registry, distribution: str = "attn-bad") -> PluginProblem:
    (problem,) = registry.problems
    assert problem.distribution == distribution
    assert problem.version == "0.9"
    assert problem.fix
    return problem


def use(registry: Registry, name: str = "bad") -> None:
    """Probe a backend: the first time that its plugin's code runs. The answer is not an exception, but a no."""
    (manifest,) = (manifest for manifest in registry.manifests if manifest.name == name)
    answers = registry.probe(manifest, CPU)
    assert [answer.ok for answer in answers.values()] == [False]
    assert answers["default"].reasons[0].code == "plugin"
    assert answers["default"].reasons[0].fix


# --- code that does not import ------------------------------------------------------------------------------------------

_IMPORT_FAULTS = {
    "missing module": ("x = 1\nimport no_such_kernels", "ModuleNotFoundError: No module named 'no_such_kernels'", 2),
    "C99 shared library": ("import ctypes\nctypes.CDLL('libno_cudart.so.12')", "OSError: libno_cudart.so.12", 2),
    "C99 exit": ("import sys\nsys.exit('no GPU, no fun')", "SystemExit: no GPU, no fun", 2),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt", 1),
    "assertion": ("assert False, 'needs sm90'", "AssertionError: needs sm90", 1),
    "syntax": ("x = 1\ndef broken(:", "SyntaxError", 2),
    "deep": ("def f():\n    raise ValueError('inside')\nf()", "ValueError: inside", 2),
}


@pytest.mark.parametrize("fault", _IMPORT_FAULTS)
def test_c99_import_error(site: Site, fault: str) -> None:
    code, text, line = _IMPORT_FAULTS[fault]
    folder = site.add("attn-bad", manifest_text("bad"), code, version="0.9")
    registry = discover()
    assert not registry.problems  # nothing was imported yet
    use(registry)
    problem = the_problem(registry)
    assert problem.cause is Cause.IMPORT
    assert text in problem.text
    assert (problem.file, problem.line) == (str(folder / "__init__.py"), line)
    assert problem.backends == ("mha/bad",)
    (bad,) = (manifest for manifest in registry.manifests if manifest.name == "bad")
    with pytest.raises(PluginError, match=r"mha/bad cannot be used") as caught:
        registry.create(bad, "default", None)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert caught.value.__cause__ is not None
    assert {info.entry_point: info.state for info in registry.plugins} == {"bad": State.FAILED, "good": State.FOUND}
    good_works(registry)


def test_c98_failure_is_recorded_logged_and_quoted(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Without a manifest the plugin is imported to be asked; what happens then is not swallowed."""
    site.add("attn-bad", None, "import bad_dependency", version="0.9")
    with caplog.at_level(logging.INFO, "attn_core"):
        registry = discover()
        discover(refresh=True)
    problem = the_problem(registry)
    assert "ModuleNotFoundError" in problem.text
    (record,) = (record for record in caplog.records if "attn-bad" in record.message)  # once, though discovered twice
    assert record.levelname == "WARNING"
    assert "attn-bad 0.9" in record.message
    for name in ("bad", "attn-bad", "attn_bad"):
        found = registry.problem_for(name)
        assert found is not None
        assert "bad_dependency" in found.text
    assert registry.problem_for("good") is None
    good_works(registry)


def test_c98_missing_module(site: Site) -> None:
    for value in ("bad_mod", "bad_mod:register"):
        site.add("attn-bad", None, None, version="0.9", value=value)
        problem = the_problem(discover(refresh=True))
        assert problem.cause is Cause.IMPORT
        assert "ModuleNotFoundError" in problem.text
        assert value in problem.text
    good_works(discover())


def test_a_failed_import_is_not_repeated(site: Site, tmp_path: Path) -> None:
    marker = tmp_path / "imports"
    code = f"open({str(marker)!r}, 'a').write('x')\nraise ImportError('no')"
    site.add("attn-bad", manifest_text("bad"), code, version="0.9")
    registry = discover()
    use(registry)
    use(registry)
    assert marker.read_text() == "x"
    assert len(registry.problems) == 1


# --- plugins that hang --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["import", "attn_probe", "attn_capabilities"])
def test_a_plugin_that_hangs(site: Site, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = "import time; time.sleep(20)"
    hook = f"\n@attn_core.hookimpl\ndef {where}():\n    {sleep}\n"
    code = f"{sleep}\n{GOOD_CODE}" if where == "import" else GOOD_CODE + hook
    name = f"hangs-in-{where}".replace("_", "-")  # Python's lock on a module whose import hangs is never released
    site.add(name, None if where == "attn_capabilities" else manifest_text("bad"), code, version="0.9")
    monkeypatch.setenv("ATTN_PLUGIN_TIMEOUT", "0.3")
    start = time.monotonic()
    registry = discover()
    if where != "attn_capabilities":
        use(registry)
        use(registry)  # not asked again
    assert time.monotonic() - start < 3
    problem = the_problem(registry, name)
    assert problem.cause is Cause.TIMEOUT
    assert f"{where} did not come back within 0.3 s" in problem.text
    assert "ATTN_PLUGIN_TIMEOUT" in problem.fix
    good_works(registry)


def test_no_time_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PLUGIN_TIMEOUT", "0")
    site.add("attn-bad", manifest_text("bad"), "raise SystemExit(3)", version="0.9")
    registry = discover()
    use(registry)
    assert "SystemExit: 3" in the_problem(registry).text


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_time_limit_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PLUGIN_TIMEOUT", value)
    registry = discover()
    with pytest.raises(UsageError, match="ATTN_PLUGIN_TIMEOUT"):
        registry.load(registry.manifests[0])


# --- hooks --------------------------------------------------------------------------------------------------------------

_HOOK_FAULTS = {
    "unknown argument": ("@attn_core.hookimpl\ndef attn_probe(manifest, gpu): pass", "not an argument of attn_probe"),
    "misspelt": ("@attn_core.hookimpl\ndef attn_prob(manifest): pass", "did you mean attn_probe?"),
    "misspelt and undecorated": ("def attn_prob(manifest): pass", "did you mean attn_probe?"),
    "undecorated": ("def attn_probe(manifest, platform): pass", "not decorated with @attn_core.hookimpl"),
    "keyword only": ("@attn_core.hookimpl\ndef attn_probe(manifest, *, platform): pass", "keyword-only parameters"),
    "**kw": ("@attn_core.hookimpl\ndef attn_probe(**kw): pass", "variadic keyword parameters receive nothing"),
    "*args": ("@attn_core.hookimpl\ndef attn_probe(*args): pass", "variadic positional parameters receive nothing"),
    "default": ("@attn_core.hookimpl\ndef attn_probe(manifest, platform=None): pass", "a default would hide"),
    "wrapper": ("@attn_core.hookimpl(wrapper=True)\ndef attn_probe(): return (yield)", "hookimpl(wrapper=…) is not"),
    "other name": ("@attn_core.hookimpl(specname='attn_probe')\ndef probe(manifest): pass", "hookimpl(specname=…)"),
    "not a function": ("import functools\nattn_probe = functools.partial(print)", "is a partial, not a function"),
}


@pytest.mark.parametrize("fault", _HOOK_FAULTS)
def test_c105_hooks_that_would_never_be_called(site: Site, fault: str) -> None:
    code, text = _HOOK_FAULTS[fault]
    site.add("attn-bad", manifest_text("bad"), f"{GOOD_CODE}\n{code}\n", version="0.9")
    registry = discover()
    use(registry)
    problem = the_problem(registry)
    assert problem.cause is Cause.HOOK
    assert text in problem.text
    assert fault == "not a function" or problem.file.endswith("attn_bad/__init__.py")
    good_works(registry)


def test_c105_all_faults_at_once(site: Site) -> None:
    code = "import attn_core\n@attn_core.hookimpl\ndef attn_probe(gpu): pass\ndef attn_create(manifest): pass"
    site.add("attn-bad", manifest_text("bad"), code, version="0.9")
    registry = discover()
    use(registry)
    lines = the_problem(registry).text.splitlines()
    assert [line.partition("(")[0] for line in lines] == ["attn_create", "attn_probe"]


def test_c105_missing_hook(site: Site) -> None:
    site.add("attn-bad", manifest_text("bad"), "", version="0.9")
    registry = discover()
    use(registry)
    assert "does not answer attn_create(manifest, variant, context)" in the_problem(registry).text


def test_helpers_with_other_names_are_left_alone(site: Site) -> None:
    code = "import attn_core.errors as attn_errors\nattn_number = 3\nclass attn_class: pass\n"
    site.add("attn-fine", manifest_text("fine"), code + GOOD_CODE)
    registry = discover()
    assert all(registry.probe(manifest, CPU)["default"].ok for manifest in registry.manifests)


def test_lazy_attributes_stay_lazy(site: Site) -> None:
    """A package that imports its kernels on attribute access is not made to do so by registration."""
    lazy = "def __dir__(): return [*globals(), 'kernels']\ndef __getattr__(name):\n    raise RuntimeError('imported ' + name)\n"
    site.add("attn-lazy", manifest_text("lazy"), GOOD_CODE + lazy)
    registry = discover()
    assert all(registry.probe(manifest, CPU)["default"].ok for manifest in registry.manifests)


_RAISING = {
    "exception": ("raise RuntimeError('driver too old')", "attn_probe: RuntimeError: driver too old"),
    "exit": ("raise SystemExit(2)", "attn_probe: SystemExit: 2"),
    "chained": (
        "raise RuntimeError('probe') from OSError('dlopen')",
        "RuntimeError: probe (caused by OSError: dlopen)",
    ),
    "nonsense": ("return 'yes'", "attn_probe: TypeError: answered 'yes'"),
    "unknown variant": ("return {'turbo': attn_core.Availability(True)}", "variants that the manifest does not have"),
}


@pytest.mark.parametrize("fault", _RAISING)
def test_raising_probe(site: Site, fault: str) -> None:
    body, text = _RAISING[fault]
    code = f"{GOOD_CODE}\n@attn_core.hookimpl\ndef attn_probe(manifest, platform):\n    {body}\n"
    site.add("attn-bad", manifest_text("bad"), code, version="0.9")
    registry = discover()
    use(registry)
    problem = the_problem(registry)
    assert problem.cause is Cause.RAISED
    assert text in problem.text
    assert not problem.fatal
    good_works(registry)


@pytest.mark.parametrize("fault", ["raise RuntimeError('no memory')", "raise SystemExit(1)", "return None"])
def test_raising_create(site: Site, fault: str) -> None:
    code = f"import attn_core\n@attn_core.hookimpl\ndef attn_create(manifest):\n    {fault}\n"
    folder = site.add("attn-bad", manifest_text("bad"), code, version="0.9")
    registry = discover()
    with pytest.raises(PluginError, match="mha/bad cannot be created") as caught:
        registry.create(registry.manifests[0], "default", None)  # type: ignore[arg-type]
    if fault != "return None":
        assert f"{folder / '__init__.py'}:4" in str(caught.value)
    assert "attn_create" in the_problem(registry).text
    with pytest.raises(AttnError, match="no variant 'turbo'"):
        registry.create(registry.manifests[0], "turbo", None)  # type: ignore[arg-type]


def test_core_errors_of_a_plugin_pass_through(site: Site) -> None:
    code = "import attn_core\n@attn_core.hookimpl\ndef attn_create(manifest):\n    raise attn_core.BindError('head dim 96')\n"
    site.add("attn-bad", manifest_text("bad"), code)
    registry = discover()
    with pytest.raises(BindError, match="head dim 96"):
        registry.create(registry.manifests[0], "default", None)  # type: ignore[arg-type]
    assert not registry.problems


def test_creation_reports_progress(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from attn_core.discovery import _loading

    monkeypatch.setattr(_loading, "PROGRESS_SECONDS", 0.05)
    code = (
        "import attn_core, time\n@attn_core.hookimpl\ndef attn_create(manifest):\n    time.sleep(0.2)\n    return 1\n"
    )
    site.add("attn-slow", manifest_text("slow"), code)
    registry = discover()
    slow = registry.manifests[1]
    assert registry.create(slow, "default", None) == 1  # type: ignore[arg-type]
    assert "still creating mha/slow:default (attn-slow) (0 s)" in caplog.text


def test_a_plugin_that_asks_for_itself(site: Site) -> None:
    code = "import attn_core\nattn_core.discover().load(attn_core.discover().manifests[0])\n" + GOOD_CODE
    site.add("attn-bad", manifest_text("bad"), code, version="0.9")
    registry = discover()
    use(registry)
    assert "asked for its own backends while it is being loaded" in the_problem(registry).text


def test_a_plugin_that_discovers_while_it_is_discovered(site: Site) -> None:
    site.add("attn-bad", None, "import attn_core\nattn_core.discover()\n" + GOOD_CODE, version="0.9")
    registry = discover()
    assert "discover() was called" in the_problem(registry).text
    good_works(registry)


# --- manifests ----------------------------------------------------------------------------------------------------------

_MANIFEST_FAULTS: dict[str, tuple[str | bytes, str]] = {
    "not TOML": ('api = "1.0"\n[[backend]\n', "not valid TOML"),
    "not UTF-8": (b'api = "\xff"', "UnicodeDecodeError"),
    "empty": ("", "api = '' is not 'major.minor'"),
    "no backends": ('api = "1.0"', "at least one [[backend]] table"),
    "unknown key": (manifest_text("bad", extra='colour = "red"'), "unknown key(s) ['colour']"),
    "unknown kind": (manifest_text("bad", kind="ssm"), "'ssm' is not one of"),
    "unknown axis": (manifest_text("bad").replace("page_size", "page_sise"), "page_sise"),
    "missing axis": (manifest_text("bad").replace("page_size = [16]", ""), "'page_size' is missing"),
    "declared twice": (manifest_text("bad", "bad"), "declared twice"),
    "backend is no list": ('api = "1.0"\nbackend = 3', "backend"),
    "C123 order rank": (manifest_text("bad", extra="[[backend.order]]\nrank = 1000\n"), "order[0].rank: 1000"),
    "api is no version": (manifest_text("bad", api="one"), "api = 'one' is not 'major.minor'"),
}


@pytest.mark.parametrize("fault", _MANIFEST_FAULTS)
def test_broken_manifest(site: Site, fault: str) -> None:
    text, expected = _MANIFEST_FAULTS[fault]
    site.add("attn-bad", text, version="0.9")
    registry = discover()
    problem = the_problem(registry)
    assert problem.cause is Cause.MANIFEST
    assert expected in problem.text
    assert [manifest.name for manifest in registry.manifests] == ["good"]
    assert "attn_bad" not in sys.modules
    if b"bad" in (text if isinstance(text, bytes) else text.encode()):
        assert registry.problem_for("bad") == problem
    good_works(registry)


def test_no_manifest_and_no_capabilities(site: Site) -> None:
    site.add("attn-bad", None, GOOD_CODE, version="0.9")
    problem = the_problem(discover())
    assert problem.cause is Cause.MANIFEST
    assert "has no attn_manifest.toml and does not answer attn_capabilities" in problem.text


@pytest.mark.parametrize(
    ("body", "cause", "text"),
    [
        ("raise ValueError('x')", Cause.RAISED, "attn_capabilities: ValueError: x"),
        ("return None", Cause.RAISED, "attn_capabilities: TypeError"),
        ("return [7]", Cause.RAISED, "answered a int"),
        ("return [{'api': '1.0', 'kind': 'mha'}]", Cause.MANIFEST, "'name' is missing"),
        ("return [{'api': '2.0', 'kind': 'mha', 'name': 'n'}]", Cause.API, "needs attn-core with API 2.x"),
        ("yield 1\n    raise SystemExit", Cause.RAISED, "attn_capabilities: SystemExit"),
    ],
)
def test_computed_capabilities_that_are_wrong(site: Site, body: str, cause: Cause, text: str) -> None:
    code = f"{GOOD_CODE}\n@attn_core.hookimpl\ndef attn_capabilities():\n    {body}\n"
    site.add("attn-bad", None, code, version="0.9")
    problem = the_problem(discover())
    assert (problem.cause, text in problem.text) == (cause, True)
    good_works(discover())


@pytest.mark.parametrize(
    ("plugin", "core", "text"),
    [
        ("2.0", "1.0", "needs attn-core with API 2.x; this is API 1.0"),
        ("1.4", "1.0", "needs attn-core with API 1.4; this is API 1.0"),
        ("1.0", "2.1", "built for API 1.0; this attn-core serves API 2.0 to 2.1"),
        ("1.9", "2.1", "built for API 1.9; this attn-core serves API 2.0 to 2.1"),
    ],
)
def test_c105_incompatible_api(site: Site, plugin: str, core: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version decides before the schema: a newer manifest may have keys that this core does not know."""
    site.add("attn-good", manifest_text("good", api=core))
    site.add("attn-bad", manifest_text("bad", api=plugin, extra='new_key = "x"'), version="0.9")
    monkeypatch.setattr(attn_core, "API_VERSION", core)
    registry = discover()
    problem = the_problem(registry)
    assert problem.cause is Cause.API
    assert text in problem.text
    assert "pip install -U" in problem.fix
    assert registry.plugins[0].state is State.INCOMPATIBLE
    found = registry.problem_for("bad")
    assert found == problem
    good_works(registry)


# --- entry points -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["attn_bad.plugin", "attn_bad:register", "attn_bad.plugin:main", "attn_bad [extra]"])
def test_entry_point_value_is_a_top_level_package(site: Site, value: str) -> None:
    site.add("attn-bad", manifest_text("bad"), "raise RuntimeError('imported')", version="0.9", value=value)
    problem = the_problem(discover())
    assert problem.cause is Cause.ENTRY_POINT
    assert value in problem.text
    assert "attn_bad" not in sys.modules
    good_works(discover())


@pytest.mark.parametrize("text", ["[attn.backends]\nbad\n", "attn.backends\n= = =\n[attn.backends]\nno equals sign"])
def test_entry_points_that_cannot_be_read(site: Site, text: str) -> None:
    site.add("attn-bad", manifest_text("bad"), version="0.9", entry_points=text)
    registry = discover()
    (problem,) = registry.problems
    assert problem.distribution == "attn-bad"
    assert problem.cause is Cause.ENTRY_POINT
    good_works(registry)


def test_two_entry_points_for_one_package(site: Site) -> None:
    entries = "[attn.backends]\nbad = attn_bad\nworse = attn_bad\n"
    site.add("attn-bad", manifest_text("bad"), version="0.9", entry_points=entries)
    registry = discover()
    assert "bad of this distribution names the package attn_bad, too" in the_problem(registry).text
    assert [manifest.name for manifest in registry.manifests] == ["bad", "good"]


# --- duplicates ---------------------------------------------------------------------------------------------------------


def test_duplicate_is_left_out_until_settled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("attn-x", manifest_text("twin", "only-x"))
    site.add("attn-y", manifest_text("twin", "only-y"))
    registry = discover()
    assert [manifest.name for manifest in registry.manifests] == ["good", "only-x", "only-y"]
    assert [problem.distribution for problem in registry.problems] == ["attn-x", "attn-y"]
    first = registry.problems[0]
    assert (first.cause, first.fatal, first.backends) == (Cause.DUPLICATE, False, ("mha/twin",))
    assert "ATTN_PREFER=attn-x:mha/twin" in first.fix
    for name in ("twin", "mha/twin", "twin:default"):
        found = registry.problem_for(name)
        assert found is not None
        assert "declared by" in found.text
    for choice in ("attn-x", "Attn_Y"):
        monkeypatch.setenv("ATTN_PREFER", f"{choice}:mha/twin")
        settled = discover(refresh=True)
        assert not settled.problems
        (twin,) = (manifest for manifest in settled.manifests if manifest.name == "twin")
        assert twin.package == choice.lower().replace("_", "-")
        assert settled.create(twin, "default", None).made_for == ("twin", "default")  # type: ignore[arg-type]


def test_one_name_in_several_kinds_is_no_duplicate(site: Site) -> None:
    gdn = manifest_text("good", kind="gdn").replace(
        'dtypes = [{ q = "bf16", kv = "bf16" }]', 'state_dtype = "fp32"\nstate_dims = [[128, 128]]'
    )
    site.add("attn-x", gdn)
    registry = discover()
    assert [manifest.id for manifest in registry.manifests] == ["mha/good", "gdn/good"]
    assert not registry.problems


def test_alias_that_means_two_things(site: Site) -> None:
    site.add("attn-x", manifest_text("x", extra='aliases = ["good", "ex"]'))
    registry = discover()
    (problem,) = registry.problems
    assert "alias good of mha/x also means another backend" in problem.text
    assert next(m for m in registry.manifests if m.name == "x").aliases == ("ex",)
    good_works(registry)


# --- what the operator says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("ATTN_PLUGINS", "attn-god", "attn-god"),
        ("ATTN_DISABLE_PLUGINS", "attn-nothing", "attn-nothing"),
        ("ATTN_PREFER", "attn-nothing:mha/good", "attn-nothing"),
        ("ATTN_PREFER", "attn-good:mha/nothing", "has no usable backend 'mha/nothing'"),
        ("ATTN_PREFER", "attn-good", "cannot be read"),
        ("ATTN_PREFER", "attn-good:good", "cannot be read"),
        ("ATTN_STRICT", "perhaps", "ATTN_STRICT"),
    ],
)
def test_unknown_names_are_errors(
    site: Site, variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("attn-bad", "nonsense", version="0.9")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as caught:
        discover()
    assert variable in str(caught.value)
    assert text in str(caught.value)


def test_unknown_name_suggests_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PLUGINS", "attn-god")
    with pytest.raises(UsageError, match="did you mean attn-good"):
        discover()


def test_prefer_twice_for_one_backend(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("attn-x", manifest_text("good"))
    monkeypatch.setenv("ATTN_PREFER", "attn-x:mha/good,attn-good:mha/good")
    with pytest.raises(UsageError, match="two distributions"):
        discover()


def test_a_filtered_plugin_is_not_even_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("attn-bad", "nonsense")
    monkeypatch.setenv("ATTN_DISABLE_PLUGINS", "attn_bad")
    registry = discover()
    assert not registry.problems
    assert [plugin.state for plugin in registry.plugins] == [State.FILTERED, State.FOUND]


def test_strict_turns_problems_into_errors(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_STRICT", "1")
    site.add("attn-bad", "nonsense", version="0.9")
    with pytest.raises(PluginError, match=r"attn-bad 0\.9"):
        discover()
    site.add("attn-bad", manifest_text("bad"), "raise ImportError('no')", version="0.9")
    registry = discover()  # nothing is known to be wrong before the import
    with pytest.raises(PluginError, match="no"):
        registry.probe(registry.manifests[0], CPU)


# --- records ------------------------------------------------------------------------------------------------------------


def test_problems_are_data(site: Site) -> None:
    site.add("attn-bad", manifest_text("bad"), "import no_such_kernels", version="0.9")
    registry = discover()
    use(registry)
    table = json.loads(json.dumps(the_problem(registry).to_dict()))
    assert table["cause"] == "import"
    assert table["line"] == 1
    assert table["fix"] == "install the package that holds 'no_such_kernels'"
    error = the_problem(registry).to_error()
    assert "at       " in str(error)
