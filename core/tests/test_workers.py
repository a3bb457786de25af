"""A worker process gets the parent's plan as data, and stops if it does not have what was planned."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

import attn_core
from attn_core.discovery import check_workers, discover, verify_plan
from attn_core.errors import WorkerMismatch
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.plan import GroupPlan, PartPlan, PhasePlan, Plan
from toy_plugins import Site, manifest_text, site

__all__ = ["site"]


def plan_of(*parts: tuple[str, str, str, str]) -> Plan:
    """A plan whose decode phase is served by (backend, variant, package, version)."""
    geometry = MhaGeometry(q_heads=8, kv_heads=2, qk_dim=128, v_dim=128, scale=0.1)
    group = LayerGroup(model="target", name="full", kind="full", layers=(0,), geometry=geometry, pools={})
    plans = tuple(PartPlan("attend", *part) for part in parts)
    phases = {"decode": PhasePlan(*parts[0], parts=plans)}
    return Plan("toy", "cpu", 16, "bf16", "NHD", "bf16", (GroupPlan(group, phases),), ())


TOY = ("toy", "default", "attn-toy", "1.2")


@pytest.fixture(autouse=True)
def installed(site: Site) -> None:
    site.add("attn-toy", manifest_text("toy"), version="1.2")


def mismatch(plan: Plan) -> str:
    with pytest.raises(WorkerMismatch) as caught:
        verify_plan(plan, discover(refresh=True))
    return str(caught.value)


def test_what_was_planned_is_here() -> None:
    check_workers(plan_of(TOY))
    verify_plan(plan_of(TOY, ("mamba", "", "", "")), discover())  # a part that the server serves itself


def test_planned_package_is_missing() -> None:
    text = mismatch(plan_of(TOY, ("other", "default", "attn-other", "2.0")))
    assert "attn-other  planned 2.0, not installed here" in text
    assert "pip install attn-other==2.0 attn-toy==1.2" in text
    assert "[AC-WRK-001]" in text


def test_another_version(site: Site) -> None:
    assert "attn-toy  planned 1.3, this process has 1.2" in mismatch(plan_of(("toy", "default", "attn-toy", "1.3")))


def test_broken_or_filtered_here(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("attn-bad", "nonsense", version="0.9")
    text = mismatch(plan_of(TOY, ("bad", "default", "attn-bad", "0.9")))
    assert "attn-bad  planned 0.9, failed here: attn-bad: attn_manifest.toml: not valid TOML" in text
    monkeypatch.setenv("ATTN_PLUGINS", "attn-toy")
    text = mismatch(plan_of(TOY, ("bad", "default", "attn-bad", "0.9")))
    assert "attn-bad  planned 0.9, filtered here: left out by ATTN_PLUGINS" in text


def test_the_same_version_without_the_backend() -> None:
    assert "attn-toy  has no backend toy:fast here" in mismatch(plan_of(("toy", "fast", "attn-toy", "1.2")))
    assert "attn-toy  has no backend toys:default here" in mismatch(plan_of(("toys", "default", "attn-toy", "1.2")))


def test_a_plan_of_another_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.0", "1.7"):
        text = mismatch(replace(plan_of(TOY), api_version=version))
        assert f"attn-core  the plan is of API {version}, this process has 1.0" in text
    monkeypatch.setattr(attn_core, "API_VERSION", "1.4")
    verify_plan(plan_of(TOY), discover(refresh=True))  # an older minor version is served


_PARENT = """
import multiprocessing, pathlib, pickle, sys

def work(data, queue):
    import attn_core
    plan = pickle.loads(data)
    try:
        attn_core.check_workers(plan)
        queue.put("fine " + plan.fingerprint)
    except attn_core.WorkerMismatch as error:
        queue.put(str(error))

if __name__ == "__main__":
    method, change, data = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]).read_bytes()
    import os
    if change:
        os.environ["ATTN_PLUGINS"] = change
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=work, args=(data, queue)); process.start()
    print(queue.get(timeout=50)); process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_plans_travel_to_workers(site: Site, tmp_path: Path, method: str) -> None:
    import subprocess
    import sys

    site.add("attn-other", manifest_text("other"), version="2.0")
    plan = plan_of(TOY)
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    outputs = []
    for change in ("", "attn-other"):
        command = [sys.executable, "-S", str(script), method, change, str(tmp_path / "plan")]
        done = subprocess.run(command, env=site.environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0].strip() == f"fine {plan.fingerprint}"
    assert "attn-toy  planned 1.2, filtered here" in outputs[1]
