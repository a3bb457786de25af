"""Discovery of plugins that are in order: real distributions in a site of their own, and what it costs to list them."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

import attn_core
from attn_core.availability import Availability
from attn_core.discovery import Registry, State, discover
from attn_core.errors import PluginError, UsageError
from attn_core.manifest import load_toml, parse_manifests
from attn_core.platform import parse_platform
from toy_plugins import GOOD_CODE, Site, manifest_text, site

__all__ = ["site"]

CPU = parse_platform("cpu")


def ids(registry: Registry) -> list[str]:
    return [manifest.id for manifest in registry.manifests]


# --- finding ------------------------------------------------------------------------------------------------------------


def test_lists_without_importing(site: Site) -> None:
    site.add("attn-one", manifest_text("one", "uno"), version="1.2")
    site.add("attn-two", manifest_text("two"), 'raise RuntimeError("listing must not import this")')
    registry = discover()
    assert ids(registry) == ["mha/one", "mha/two", "mha/uno"]
    assert not registry.problems
    assert {"attn_one", "attn_two"}.isdisjoint(sys.modules)
    info = registry.plugins[0]
    assert (info.distribution, info.version, info.origin, info.entry_point) == ("attn-one", "1.2", "index", "one")
    assert (info.package, info.backends, info.state) == ("attn_one", ("mha/one", "mha/uno"), State.FOUND)
    assert registry.manifests[0].package == "attn-one"
    assert registry.manifests[0].version == "1.2"


def test_zipped_install(site: Site) -> None:
    site.add("attn-zipped", manifest_text("zipped"), zipped=True)
    script = """
import attn_core, sys
registry = attn_core.discover()
assert [m.id for m in registry.manifests] == ["mha/zipped"], registry.problems
assert "attn_zipped" not in sys.modules
assert ".zip" in registry.load(registry.manifests[0]).__file__
"""
    site.check(script)


def test_editable_install(site: Site, tmp_path: Path) -> None:
    source = tmp_path / "checkout" / "src" / "attn_edit"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text(GOOD_CODE)
    (source / "attn_manifest.toml").write_text(manifest_text("edit"))
    url = json.dumps({"url": f"file://{tmp_path}/checkout", "dir_info": {"editable": True}})
    site.add("attn-edit", None, None, direct_url=url)
    sys.path.append(str(source.parent))  # what the .pth file of an editable install does
    try:
        registry = discover()
    finally:
        sys.path.remove(str(source.parent))
    assert ids(registry) == ["mha/edit"]
    assert registry.plugins[0].origin == f"editable {tmp_path}/checkout"


@pytest.mark.parametrize(
    ("direct_url", "origin"),
    [
        (None, "index"),
        ('{"url": "https://host/x.whl", "archive_info": {}}', "https://host/x.whl"),
        ('{"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}', "git+https://host/x@abc"),
        ('{"url": 1', "unreadable direct_url.json"),
    ],
)
def test_origin(site: Site, direct_url: str | None, origin: str) -> None:
    site.add("attn-toy", manifest_text("toy"), direct_url=direct_url)
    assert discover().plugins[0].origin == origin


def test_order_does_not_depend_on_the_path(site: Site, tmp_path: Path) -> None:
    site.add("attn-b", manifest_text("late", "early"))
    site.add("attn-a", manifest_text("middle"))
    site.add(
        "attn-c",
        manifest_text("m", kind="gdn").replace(
            'dtypes = [{ q = "bf16", kv = "bf16" }]', 'state_dtype = "fp32"\nstate_dims = [[128, 128]]'
        ),
    )
    found = ids(discover())
    site.path.reverse()
    assert found == ["mha/early", "mha/late", "mha/middle", "gdn/m"] == ids(discover(refresh=True))


def test_idempotent_and_refreshed(site: Site) -> None:
    site.add("attn-a", manifest_text("a"))
    first = discover()
    assert discover() is first
    site.add("attn-b", manifest_text("b"))
    assert ids(discover()) == ["mha/a"]
    assert ids(discover(refresh=True)) == ["mha/a", "mha/b"]


def test_thread_safe(site: Site) -> None:
    site.add("attn-a", manifest_text("a"), GOOD_CODE + "\nimport time; time.sleep(0.2)\n")
    found: list[object] = []

    def work() -> None:
        registry = discover()
        found.append((registry, registry.load(registry.manifests[0])))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_computed_capabilities(site: Site) -> None:
    code = (
        GOOD_CODE
        + f"""
@attn_core.hookimpl
def attn_capabilities():
    from attn_core.manifest import load_toml, parse_manifests
    made, other = parse_manifests(load_toml({manifest_text("first", "second")!r}))
    yield made
    yield other.to_dict()
"""
    )
    site.add("attn-computed", None, code, version="3.1")
    registry = discover()
    assert ids(registry) == ["mha/first", "mha/second"], registry.problems
    assert {(m.package, m.version) for m in registry.manifests} == {("attn-computed", "3.1")}
    assert registry.plugins[0].state is State.LOADED
    assert registry.probe(registry.manifests[0], CPU)["default"].ok
    assert registry.create(registry.manifests[1], "default", None).made_for == ("second", "default")  # type: ignore[arg-type]


# --- settings -----------------------------------------------------------------------------------------------------------


def test_only_these_plugins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        site.add(f"attn-{name}", manifest_text(name))
    monkeypatch.setenv("ATTN_PLUGINS", "attn-a, attn_b")  # a distribution and an import package
    monkeypatch.setenv("ATTN_DISABLE_PLUGINS", "b")  # an entry point
    registry = discover()
    assert ids(registry) == ["mha/a"]
    assert [plugin.state for plugin in registry.plugins] == [State.FOUND, State.FILTERED, State.FILTERED]


def test_c123_the_operator_excludes_a_plugin(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("attn-own", manifest_text("own"))
    site.add("third-party", manifest_text("third", extra="[[backend.order]]\nrank = 1\n"))
    assert ids(discover()) == ["mha/own", "mha/third"]
    monkeypatch.setenv("ATTN_DISABLE_PLUGINS", "third-party")
    assert ids(discover(refresh=True)) == ["mha/own"]


def test_c123_importing_a_plugin_changes_nothing_of_core(site: Site) -> None:
    site.add("attn-toy", manifest_text("toy"))
    script = """
import attn_core, sys
registry = attn_core.discover()
import attn_core.discovery._hookcheck, attn_core.hookspecs
def snapshot():
    return {(name, key): id(value) for name, module in list(sys.modules.items()) if name.split(".")[0] == "attn_core"
            for key, value in vars(module).items()}
before = snapshot()
registry.load(registry.manifests[0])
assert before.items() <= snapshot().items()
"""
    site.check(script)


# --- probing and creating -----------------------------------------------------------------------------------------------


def test_default_probe_checks_requirements_and_tools(site: Site) -> None:
    variant = """requires = ["pluggy>=1", "no-such-kernels>=2.1", "click<1", "other; python_version < '3'"]
toolkit = ["no-such-compiler", "sh"]"""
    site.add("attn-toy", manifest_text("toy", variant=variant))
    answer = discover().probe(discover().manifests[0], CPU)["default"]
    assert not answer.ok
    assert [(reason.code, reason.need) for reason in answer.reasons] == [
        ("library", "no-such-kernels>=2.1"),
        ("library", "click<1"),
        ("toolkit", "no-such-compiler"),
    ]
    assert answer.needs == "pip install 'no-such-kernels>=2.1' 'click<1'"
    assert set(answer.versions) == {"pluggy", "click"}


def test_c114_a_probe_says_which_binaries_there_are(site: Site) -> None:
    code = (
        GOOD_CODE
        + """
from attn_core.availability import Availability
from attn_core.reasons import Reason

@attn_core.hookimpl
def attn_probe(platform, manifest):
    archs = ("sm80", "sm90", "sm100", "sm120")
    if platform.arch in archs:
        return Availability(True, archs=archs)
    return {"default": Availability(False, (Reason("arch", ", ".join(archs), f"no code for {platform.arch}"),), archs=archs)}
"""
    )
    site.add("attn-toy", manifest_text("toy"), code)
    registry = discover()
    (manifest,) = registry.manifests
    refused = registry.probe(manifest, parse_platform({"device": "cuda", "sm": 121}))["default"]
    assert not refused.ok
    assert "no code for sm121" in str(refused.reasons[0])
    assert registry.probe(manifest, parse_platform("cuda:sm90")) == {
        "default": Availability(True, archs=("sm80", "sm90", "sm100", "sm120"))
    }


def test_only_the_owner_is_asked(site: Site) -> None:
    code = (
        GOOD_CODE
        + """
asked = []
@attn_core.hookimpl
def attn_probe(manifest):
    asked.append(manifest.name)
"""
    )
    for name in ("a", "b"):
        site.add(f"attn-{name}", manifest_text(name), code)
    registry = discover()
    for manifest in registry.manifests:
        assert registry.probe(manifest, CPU)["default"].ok  # the hook answered None: the default probe decides
    assert sys.modules["attn_a"].asked == ["a"]
    assert sys.modules["attn_b"].asked == ["b"]
    assert registry.create(registry.manifests[1], "default", None).made_for == ("b", "default")


def test_c111_a_missing_library_of_another_plugin_is_no_obstacle(site: Site) -> None:
    site.add(
        "attn-needy", manifest_text("needy", variant='requires = ["flash-attn"]'), "import flash_attn\n" + GOOD_CODE
    )
    site.add("attn-plain", manifest_text("plain"))
    script = """
import sys
for name in ("flashinfer", "flash_attn", "sgl_kernel"):
    sys.modules[name] = None
import attn_core
registry = attn_core.discover()
needy, plain = registry.manifests
assert not registry.problems
assert registry.probe(plain, attn_core.parse_platform("cpu"))["default"].ok
assert registry.create(plain, "default", None).made_for == ("plain", "default")
assert "attn_needy" not in sys.modules
answer = registry.probe(needy, attn_core.parse_platform("cpu"))["default"]
assert not answer.ok and "flash_attn" in str(answer.reasons[0]), answer
"""
    site.check(script)


def test_planned_backends_are_not_imported(site: Site) -> None:
    site.add("attn-toy", manifest_text("toy", status="planned"))
    registry = discover()
    assert "planned" in str(registry.probe(registry.manifests[0], CPU)["default"].reasons[0])
    assert "attn_toy" not in sys.modules


def test_c48_capabilities_are_not_inherited(site: Site) -> None:
    """A child that subclasses another plugin's backend declares for itself what it can do; silence is a no."""
    declared = manifest_text("parent").replace(
        "[[backend.variant.allow]]\n", '[[backend.variant.allow]]\nfeatures = ["batch_invariant"]\n'
    )
    site.add("attn-parent", declared)
    site.add(
        "attn-child",
        manifest_text("child"),
        GOOD_CODE + "import attn_parent\nclass Backend(attn_parent.Backend): pass\n",
    )
    child, parent = discover().manifests
    assert parent.variants[0].allow[0].features == {"batch_invariant"}
    assert child.variants[0].allow[0].features == frozenset()


def test_c45_one_registry_for_all_roles(site: Site) -> None:
    """There is no list of draft backends: a plugin that declares the draft phase alone is listed like any other."""
    site.add("attn-toy", manifest_text("toy").replace('phase = ["prefill", "decode"]', 'phase = ["draft"]'))
    (manifest,) = discover().manifests
    (row,) = manifest.variants[0].allow
    base = {"vendor": "cpu", "dtypes": ("bf16", "bf16", "bf16"), "page_size": 16, "head_dims": (128, 128)}
    allowed = [
        phase
        for phase in ("prefill", "decode", "verify", "draft", "draft_extend")
        if all(condition.holds({**base, "phase": phase}) for condition in row.conditions)
    ]
    assert allowed == ["draft"]


def test_hand_made_manifests() -> None:
    (manifest,) = parse_manifests(
        load_toml(manifest_text("toy", variant='requires = ["pluggy"]')),
        package="toys",
        version="1",
    )

    class Module:
        @attn_core.hookimpl
        def attn_create(self, manifest, variant, context):  # type: ignore[no-untyped-def]
            return [manifest.id, variant, context]

    bare = Registry.with_manifests([manifest])
    assert bare.probe(manifest, CPU)["default"].ok
    with pytest.raises(PluginError, match="without code"):
        bare.create(manifest, "default", None)  # type: ignore[arg-type]
    full = Registry.with_manifests([manifest], modules={"toys": Module()})
    assert full.create(manifest, "default", 7) == ["mha/toy", "default", 7]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="serves mha/toy"):
        Registry.with_manifests([]).load(manifest)


# --- cost ---------------------------------------------------------------------------------------------------------------


def test_import_is_light(site: Site) -> None:
    script = """
import sys
before = set(sys.modules)
import attn_core
assert "torch" not in sys.modules
own = [name for name in sys.modules if name.split(".")[0] == "attn_core"]
assert len(own) < 5, own
registry = attn_core.discover()
assert {"torch", "rich", "click", "pluggy", "packaging"}.isdisjoint(sys.modules)
own = [name for name in sys.modules if name.split(".")[0] == "attn_core"]
print(len(own), len(set(sys.modules) - before))
"""
    own, new = map(int, site.check(script).split())
    assert own < 100
    assert new < 250


def test_import_without_torch_in_this_environment() -> None:
    import subprocess

    script = "import sys, attn_core; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_public_names_exist() -> None:
    from attn_core._lazy import NAMES

    assert set(NAMES) <= set(dir(attn_core))
    for name in NAMES:
        assert getattr(attn_core, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = attn_core.nothing  # type: ignore[attr-defined]


def test_type_checkers_see_the_public_names() -> None:
    import ast

    from attn_core._lazy import NAMES

    tree = ast.parse(Path(attn_core.__file__).read_text())
    seen = {
        alias.name: str(node.module).removeprefix("attn_core.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("attn_core.")
        and node.module != "attn_core._lazy"
        for alias in node.names
    }
    assert seen == {**NAMES, "plan": "planner"}


def test_plan_is_a_module_and_a_function() -> None:
    from attn_core.plan import Plan

    assert attn_core.plan.Plan is Plan  # type: ignore[attr-defined]
    assert callable(attn_core.plan)


# --- processes ----------------------------------------------------------------------------------------------------------

_WORKERS = """
import multiprocessing, sys

def work(queue):
    import attn_core
    registry = attn_core.discover()
    module = registry.load(registry.manifests[0])
    queue.put(([m.id for m in registry.manifests], module.__name__, [str(p) for p in registry.problems]))

if __name__ == "__main__":
    import attn_core
    if sys.argv[1] != "spawn-cold":
        attn_core.discover()
    context = multiprocessing.get_context(sys.argv[1].partition("-")[0])
    queue = context.Queue()
    processes = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    for process in processes: process.start()
    answers = [queue.get(timeout=50) for _ in processes]
    for process in processes: process.join()
    assert all(a == (["mha/a", "mha/b"], "attn_a", []) for a in answers), answers
"""


@pytest.mark.parametrize("method", ["spawn", "spawn-cold", "fork"])
def test_workers_find_the_same(site: Site, tmp_path: Path, method: str) -> None:
    import subprocess

    for name in ("a", "b"):
        site.add(f"attn-{name}", manifest_text(name))
    script = tmp_path / "workers.py"
    script.write_text(_WORKERS)
    command = [sys.executable, "-S", str(script), method]
    done = subprocess.run(command, env=site.environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fork_while_another_thread_holds_the_locks(site: Site) -> None:
    site.add("attn-slow", manifest_text("slow"), "import time; time.sleep(1.5)\n" + GOOD_CODE)
    site.add("attn-fast", manifest_text("fast"))
    script = """
import os, threading, time, warnings
warnings.simplefilter("ignore")
import attn_core
registry = attn_core.discover()
fast, slow = registry.manifests
thread = threading.Thread(target=registry.load, args=(slow,)); thread.start()
time.sleep(0.3)
child = os.fork()
if child == 0:
    assert attn_core.discover() is registry
    assert registry.problems == ()
    registry.load(fast)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
"""
    site.check(script)


def test_plugin_imported_before_core(site: Site) -> None:
    site.add("attn-toy", manifest_text("toy"), "from attn_core import hookimpl\n" + GOOD_CODE)
    script = """
import attn_toy
import attn_core
registry = attn_core.discover()
assert registry.load(registry.manifests[0]) is attn_toy
assert not registry.problems
"""
    site.check(script)


# --- versions of the contract -------------------------------------------------------------------------------------------


def test_plugin_of_an_older_minor_keeps_working(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the arguments it knew; the later ones of the hook are dropped, in any order."""
    code = """
import attn_core

@attn_core.hookimpl
def attn_probe(platform):
    from attn_core.availability import Availability
    return Availability(platform.device == "cpu")

@attn_core.hookimpl
def attn_create(variant, manifest):
    return (manifest.id, variant)
"""
    site.add("attn-old", manifest_text("old", api="1.0"), code)
    monkeypatch.setattr(attn_core, "API_VERSION", "1.3")
    registry = discover()
    (manifest,) = registry.manifests
    assert registry.probe(manifest, CPU)["default"].ok
    assert registry.create(manifest, "default", None) == ("mha/old", "default")  # type: ignore[arg-type]
    assert not registry.problems
