"""The published schemas: in step with the code, and of one opinion with the parser."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from attn_core import schemas
from attn_core.cli import run
from attn_core.errors import ManifestError, PlanError
from attn_core.manifest import load_toml, parse_manifests
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from toy_plugins import Site, manifest_text, site
from toys import mha_model, toy

__all__ = ["site"]

PLAIN = """
api = "1.0"
[[backend]]
kind = "mha"
name = "vendor"
[[backend.variant]]
name = "default"
[[backend.variant.allow]]
features = ["lse"]
graph = { level = "uniform_decode" }
when = { arch = ["sm90"], phase = ["decode"], dtypes = [{ q = "bf16", kv = "bf16" }], page_size = [16], head_dims = [[64, 64]] }
[[backend.order]]
rank = 40
when = { arch = ["sm90"], format = { dtype = "fp4" }, peer = { decode = ["x"] }, library = { torch = ">=2.6" } }
"""


@pytest.mark.parametrize("name", ["manifest-1", "plan-1", "plan-error-1", "list-1", "doctor-1"])
def test_files_are_in_step_with_the_registries(name: str) -> None:
    assert schemas.load(name) == schemas.build()[name], "run python -m attn_core.schemas"
    Draft202012Validator.check_schema(schemas.load(name))


def both(document: dict[str, Any]) -> tuple[bool, bool]:
    """(the parser accepts, the schema accepts)."""
    try:
        parse_manifests(document)
        parsed = True
    except ManifestError:
        parsed = False
    return parsed, Draft202012Validator(schemas.load("manifest-1")).is_valid(document)


def test_parser_and_schema_accept_what_is_right() -> None:
    assert both(load_toml(PLAIN)) == (True, True)
    root = Path(__file__).resolve().parents[2]
    for path in root.glob("plugins/*/src/*/attn_manifest.toml"):
        assert both(load_toml(path.read_text(encoding="utf-8"))) == (True, True), path


MISTAKES: list[tuple[str, Any]] = [
    ("backend.0.kind", "mlha"),
    ("backend.0.name", "two words"),
    ("backend.0.status", "done"),
    ("backend.0.colour", "red"),
    ("backend.0.variant", []),
    ("backend.0.variant.0.roles", ["attends"]),
    ("backend.0.variant.0.jit", "yes"),
    ("backend.0.variant.0.allow", []),
    ("backend.0.variant.0.allow.0.features", ["sliding_windows"]),
    ("backend.0.variant.0.allow.0.graph", {"level": "all"}),
    ("backend.0.variant.0.allow.0.when.arhc", ["sm90"]),
    ("backend.0.variant.0.allow.0.when.phase", ["decoding"]),
    ("backend.0.variant.0.allow.0.when.page_size", {"least": 1}),
    ("backend.0.variant.0.allow.0.when.page_size", "16"),
    ("backend.0.variant.0.allow.0.when.head_dims", [64]),
    ("backend.0.variant.0.allow.0.when.dtypes", [{"q": "bf17"}]),
    ("backend.0.variant.0.allow.0.when.hicache", "no"),
    ("backend.0.order.0.rank", 1000),
    ("backend.0.order.0.rank", 0),
    ("backend.0.companion", [{"phase": "prefill"}]),
    ("api", None),
]


@pytest.mark.parametrize(("place", "value"), MISTAKES, ids=[f"{p}={v}" for p, v in MISTAKES])
def test_parser_and_schema_refuse_the_same_mistakes(place: str, value: Any) -> None:
    document = copy.deepcopy(load_toml(PLAIN))
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    target: Any = document
    for part in path:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value
    assert both(document) == (False, False)


@pytest.mark.parametrize("axis", ["arch", "phase", "dtypes", "page_size", "head_dims"])
def test_a_row_that_leaves_a_required_axis_out_claims_nothing(axis: str) -> None:
    document = copy.deepcopy(load_toml(PLAIN))
    del document["backend"][0]["variant"][0]["allow"][0]["when"][axis]
    assert both(document) == (False, False)


def test_plans_and_errors_fit_their_schemas() -> None:
    platform = parse_platform("cuda:sm90")
    plan = solve_plan(mha_model(), platform, Options.of(), [toy("a"), toy("b", arch=["sm80"])], tie_order={})
    Draft202012Validator(schemas.load("plan-1")).validate(plan.to_dict())
    with pytest.raises(PlanError) as caught:
        solve_plan(mha_model(), platform, Options.of(), [toy("b", arch=["sm80"])], tie_order={})
    Draft202012Validator(schemas.load("plan-error-1")).validate(caught.value.to_dict())


def test_what_list_and_doctor_print_fits_their_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    """With whatever is installed here, problems and file checks included."""
    for arguments in (["list", "--json"], ["doctor", "--json", "--verify", "--device", "cpu"]):
        assert run(arguments) in (0, 1)
        document = json.loads(capsys.readouterr().out)
        Draft202012Validator(schemas.load(f"{arguments[0]}-1")).validate(document)
        assert document["backends"]


def test_a_broken_plugin_fits_the_schema_of_list(site: Site) -> None:
    site.add("attn-bad", "nonsense")
    site.add("attn-worse", None, "import nothing_here")
    site.add("attn-good", manifest_text("good"))
    for command in ("list", "doctor"):
        done = site.attn(command, "--json")
        document = json.loads(done.stdout)
        Draft202012Validator(schemas.load(f"{command}-1")).validate(document)
        assert document["problems"]
