"""``attn list`` and ``attn doctor``: what they say, what they cost, and the exit status of every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_core import cli
from attn_core.cli import COMMANDS, LazyGroup, exit_status, run
from attn_core.errors import BindError, ModelError, PlanError, PlatformError, UsageError
from toy_plugins import GOOD_CODE, Site, manifest_text, site

__all__ = ["site"]

LISTED = "import sys\nfrom attn_core.cli import run\nstatus = run(['list', *sys.argv[1:]])\n"


def test_list_imports_no_plugin(site: Site) -> None:
    """25 plugins of which none can be imported; no torch, no planner, no rich."""
    for number in range(25):
        site.add(f"attn-toy{number}", manifest_text(f"toy{number}"), "raise SystemExit('imported')")
    script = (
        LISTED
        + """
assert status == 0
assert not [name for name in sys.modules if name.startswith("attn_toy")]
assert {"torch", "rich", "numpy", "pluggy"}.isdisjoint(sys.modules)
own = [name for name in sys.modules if name.split(".")[0] == "attn_core"]
assert not [name for name in own if "planner" in name or "router" in name], own
assert len(own) < 100
"""
    )
    output = site.check(script)
    for number in range(25):
        assert f"attn-toy{number}" in output


def test_list_shows_everything(site: Site) -> None:
    url = json.dumps({"url": "file:///src/toy", "dir_info": {"editable": True}})
    site.add("attn-toy", manifest_text("toy", "later", status="planned"), version="1.2", direct_url=url)
    site.add("attn-bad", "nonsense", version="0.9")
    site.add("attn-off", manifest_text("off"))
    done = site.attn("list", ATTN_DISABLE_PLUGINS="attn-off")
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # problems are printed once, not logged as well
    lines = done.stdout.splitlines()
    assert lines[0] == "mha"
    assert lines[1].split() == ["backend", "status", "variants", "package", "version", "origin"]
    assert lines[3].split() == ["toy", "planned", "default", "attn-toy", "1.2", "editable", "/src/toy"]
    assert "left out by ATTN_PLUGINS or ATTN_DISABLE_PLUGINS: attn-off" in lines
    assert "1 problem(s)" in lines
    assert any("bad (attn-bad 0.9)  manifest: attn-bad: attn_manifest.toml: not valid TOML" in line for line in lines)


def test_list_as_json(site: Site) -> None:
    site.add("attn-toy", manifest_text("toy", extra='aliases = ["t"]\nsummary = "A toy"'), version="1.2")
    site.add("attn-bad", None, "import nothing_here", version="0.9")
    document = json.loads(site.attn("list", "--json").stdout)
    assert document["schema_version"] == 1
    assert document["backends"] == [
        {
            "kind": "mha",
            "name": "toy",
            "status": "implemented",
            "summary": "A toy",
            "aliases": ["t"],
            "variants": ["default"],
            "api": "1.0",
            "package": "attn-toy",
            "version": "1.2",
            "origin": "index",
            "state": "found",
        }
    ]
    assert {plugin["distribution"]: plugin["state"] for plugin in document["plugins"]} == {
        "attn-bad": "failed",
        "attn-toy": "found",
    }
    (problem,) = document["problems"]
    assert problem["cause"] == "import"
    assert "nothing_here" in problem["text"]


def test_list_of_nothing_names_what_to_install(site: Site) -> None:
    done = site.attn("list")
    assert done.returncode == 0
    assert "no backend plugin is installed" in done.stdout
    assert "pip install one of attn-" in done.stdout


@pytest.mark.parametrize(
    ("variables", "status", "text"),
    [
        ({"ATTN_PLUGINS": "nothing"}, 2, "UsageError [AC-USE-001] ATTN_PLUGINS names 'nothing'"),
        ({"ATTN_STRICT": "1"}, 1, "PluginError [AC-PLG-001] 1 plugin problem(s)"),
    ],
)
def test_errors_are_rendered_once(site: Site, variables: dict[str, str], status: int, text: str) -> None:
    site.add("attn-bad", "nonsense", version="0.9")
    done = site.attn("list", "--json", **variables)
    assert done.returncode == status
    assert done.stderr.startswith(text)
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert document["error"]["code"] in text


# --- doctor -------------------------------------------------------------------------------------------------------------


def test_doctor_probes_and_reports(site: Site, tmp_path: Path) -> None:
    site.add("attn-good", manifest_text("good"))
    site.add("attn-needy", manifest_text("needy", variant='requires = ["no-such-kernels>=2"]'))
    site.add("attn-later", manifest_text("later", status="planned"))
    site.add("attn-elsewhere", manifest_text("elsewhere").replace('["nvidia", "cpu"]', '["nvidia"]\narch = ["sm90"]'))
    report = tmp_path / "report.json"
    done = site.attn("doctor", "--device", "cpu", "--report", str(report), ATTN_PLUGIN_TIMEOUT="9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "platform   cpu" in done.stdout
    assert "no-such-kernels missing" in done.stdout
    assert "setting    ATTN_PLUGIN_TIMEOUT=9" in done.stdout
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  mha/")}
    assert rows["mha/good:default"].split()[1] == "ready"
    assert rows["mha/later:default"].split()[1] == "planned"
    assert "pip install 'no-such-kernels>=2'" in rows["mha/needy:default"]
    assert rows["mha/elsewhere:default"].split()[1] == "no"
    assert "arch: needs sm90; have cpu" in rows["mha/elsewhere:default"]
    assert "no problem found" in done.stdout
    document = json.loads(report.read_text())
    assert document["schema_version"] == 1
    assert document["ok"] is True
    assert document["platform"]["device"] == "cpu"
    assert document["libraries"]["no-such-kernels"] == ""
    assert {plugin["distribution"]: plugin["state"] for plugin in document["plugins"]}["attn-good"] == "loaded"


def test_doctor_fails_when_there_is_a_problem(site: Site) -> None:
    site.add("attn-bad", manifest_text("bad"), "import no_such_thing", version="0.9")
    done = site.attn("doctor", "--device", "cpu")
    assert done.returncode == 1
    assert "bad (attn-bad 0.9)  import: ModuleNotFoundError" in done.stdout
    assert "try  install the package that holds 'no_such_thing'" in done.stdout
    assert not done.stderr


def test_doctor_of_a_device_that_is_not_here(site: Site) -> None:
    done = site.attn("doctor", "--device", "npu")
    assert done.returncode == 2
    assert "this machine has no npu device" in done.stderr


def test_doctor_verifies_files(site: Site) -> None:
    site.add("attn-kept", manifest_text("kept"))
    changed = site.add("attn-changed", manifest_text("changed"))
    (changed / "__init__.py").write_text(GOOD_CODE + "# patched\n")
    (changed / "extra.py").write_text("")
    (changed / "attn_manifest.toml").write_text(manifest_text("changed"))
    site.add("attn-edit", manifest_text("edit"), direct_url='{"url": "file:///x", "dir_info": {"editable": true}}')
    bare = site.add("attn-bare", manifest_text("bare"))
    (bare.parent / "attn_bare-1.0.dist-info" / "RECORD").unlink()
    document = json.loads(site.attn("doctor", "--verify", "--json", "--device", "cpu").stdout)
    files = {item["distribution"]: item for item in document["files"]}
    assert files["attn-kept"]["result"] == "verified"
    assert files["attn-changed"]["result"] == "changed"
    assert files["attn-changed"]["changed"] == ["attn_changed/__init__.py"]
    assert files["attn-changed"]["unlisted"] == ["attn_changed/extra.py"]
    assert files["attn-edit"]["text"].startswith("cannot verify: an editable install")
    assert files["attn-bare"]["text"].startswith("cannot verify: it was installed without a RECORD")
    assert document["ok"] is False
    done = site.attn("doctor", "--verify", "--device", "cpu")
    assert done.returncode == 1
    assert "files of attn-changed 1.0: 1 changed, 0 missing, 1 not in RECORD" in done.stdout


def test_doctor_verifies_a_missing_file_and_a_zip(site: Site) -> None:
    lost = site.add("attn-lost", manifest_text("lost"))
    site.add("attn-zipped", manifest_text("zipped"), zipped=True)
    document = json.loads(site.attn("doctor", "--verify", "--json", "--device", "cpu").stdout)
    assert {item["result"] for item in document["files"]} == {"verified"}
    (lost / "attn_manifest.toml").unlink()
    document = json.loads(site.attn("doctor", "--verify", "--json", "--device", "cpu").stdout)
    assert document["files"][0]["missing"] == ["attn_lost/attn_manifest.toml"]


# --- the command itself -------------------------------------------------------------------------------------------------


def test_exit_status() -> None:
    errors = (PlanError("x"), UsageError("x"), ModelError("x"), PlatformError("x"), BindError("x"))
    assert [exit_status(error) for error in errors] == [3, 2, 2, 2, 1]


def test_unknown_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lits"]) == 2
    assert "Did you mean 'list'?" in capsys.readouterr().err
    assert run(["list", "--nothing"]) == 2


def test_help_imports_no_command(site: Site) -> None:
    script = """
import sys
from attn_core.cli import run
assert run(["--help"]) == 0
assert not [name for name in sys.modules if name.startswith("attn_core.cli.")]
"""
    output = site.check(script)
    assert "list" in output
    assert COMMANDS["list"] in " ".join(output.split())


def test_every_offered_command_loads() -> None:
    group = cli.attn
    assert isinstance(group, LazyGroup)
    context = cli.click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        assert command.name == name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert "(API 1.0)" in capsys.readouterr().out


def test_a_closed_pipe_is_no_traceback(site: Site) -> None:
    import subprocess
    import sys

    for number in range(3):
        site.add(f"attn-toy{number}", manifest_text(*(f"toy{number}x{i}" for i in range(400))))
    command = f"{sys.executable} -S -c \"from attn_core.cli import main; main(['list'])\" | head -1"
    done = subprocess.run(
        command, shell=True, env=site.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "mha\n"
    assert "Traceback" not in done.stderr
