"""The recurrent oracle against flash-linear-attention's naive functions: an implementation that is not ours."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attn_core.testing import oracle_gdn


@pytest.fixture(scope="module")
def naive() -> ModuleType:
    """fla's ``naive.py`` alone: importing the package would need a GPU build of triton."""
    pytest.importorskip("einops")
    try:
        files = metadata.files("fla-core") or []
    except metadata.PackageNotFoundError:
        pytest.skip("needs fla-core")
    found = next(file for file in files if str(file).endswith("gated_delta_rule/naive.py"))
    spec = importlib.util.spec_from_file_location("fla_naive", Path(str(found.locate())))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def world(tokens: int) -> dict[str, torch.Tensor]:
    """Random q, k [T, 2, 8], v [T, 4, 6], log gates and betas [T, 4], and a state [4, 6, 8] (V first), in float64."""
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(tokens, 2, 8), dim=-1)
    gate = -torch.nn.functional.softplus(normal(tokens, 4))
    return {
        "q": normal(tokens, 2, 8),
        "k": k,
        "v": normal(tokens, 4, 6),
        "g": gate,
        "beta": normal(tokens, 4).sigmoid(),
        "state": normal(4, 6, 8),
    }


def ours(w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    state, outs = w["state"], []
    for t in range(len(w["q"])):
        out, state = oracle_gdn.recur(w["q"][t], w["k"][t], w["v"][t], w["g"][t], w["beta"][t], state)
        outs.append(out)
    return torch.stack(outs), state


@pytest.mark.parametrize("tokens", [1, 7, 64, 130])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_gated_delta_rule(naive: ModuleType, tokens: int, form: str) -> None:
    w = world(tokens)
    expected, last = ours(w)
    wide = {name: w[name].repeat_interleave(2, dim=1)[None].float() for name in ("q", "k")}
    arguments = {**wide, **{name: w[name][None].float() for name in ("v", "g", "beta")}}
    more = {"scale": 1.0, "initial_state": w["state"].transpose(1, 2)[None].float(), "output_final_state": True}
    function = getattr(naive, f"naive_{form}_gated_delta_rule")
    out, state = function(**arguments, **more)
    torch.testing.assert_close(out[0].double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state[0].transpose(1, 2).double(), last, rtol=2e-5, atol=2e-5)
