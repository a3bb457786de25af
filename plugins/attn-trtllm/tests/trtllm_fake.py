"""FlashInfer's four functions as recording fakes: real signatures, the library's own demands, float64 arithmetic in torch.

``install(monkeypatch)`` puts modules ``flashinfer.decode`` and ``flashinfer.prefill`` in place of the real ones. Every call is
checked against what the kernels assume (types, contiguity, zeroed semaphores, block tables that count from one base) and then
computed, so that the conformance kit judges the adapter on a CPU.
"""

from __future__ import annotations

import ast
import ctypes
import math
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import attn_trtllm
from attn_core.formats import dequantize
from attn_core.manifest import load_toml, parse_manifests
from attn_core.testing.harness import BackendUnderTest

DATA = Path(__file__).parent / "data"
SEMAPHORES = 8 << 20
CAPABILITIES = {"xqa": (9, 0), "fmha_v2": (9, 0), "trtllm-gen": (10, 0)}
ARCHS = ('["sm90", "sm120", "sm121"]', '["sm90"]', '["sm120", "sm121"]', '["sm100", "sm103"]')
LN2 = math.log(2.0)


def on_cpu() -> BackendUnderTest:
    """The manifest with every architecture replaced by the CPU, and no probe: the fakes stand in for the library."""
    text = (Path(attn_trtllm.__file__).parent / "attn_manifest.toml").read_text(encoding="utf-8")
    for archs in ARCHS:
        text = text.replace(f"arch = {archs}", 'arch = ["cpu"]')
    manifest = parse_manifests(load_toml(text))[0]
    backend = BackendUnderTest.of_module(attn_trtllm, manifest)
    backend.probe = None
    return backend


@dataclass
class Recorder:
    """What was called: (function, arguments), and which workspace belongs to which family of kernels."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    workspaces: dict[int, str] = field(default_factory=dict)
    capability: tuple[int, int] = (9, 0)

    def owns(self, workspace: torch.Tensor, family: str) -> None:
        """A workspace is one-dimensional bytes, and never shared with another family."""
        require(workspace.dtype == torch.uint8 and workspace.is_contiguous(), "a workspace is contiguous bytes")
        assert self.workspaces.setdefault(workspace.data_ptr(), family) == family, "a workspace is shared"


def require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def functions(version: str = "0.7.4") -> dict[str, list[str]]:
    """Name -> parameters (with ``=...`` where there is a default), from the fixture."""
    tree = ast.parse((DATA / f"flashinfer-{version}.txt").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef)
        first = len(node.args.args) - len(node.args.defaults)
        found[node.name] = [a.arg + ("=None" if i >= first else "") for i, a in enumerate(node.args.args)]
    return found


def install(monkeypatch: Any, version: str = "0.7.4", capability: tuple[int, int] = (9, 0)) -> Recorder:
    """Fake modules with the signatures of a release, and a device that claims to be one of that capability."""
    from attn_trtllm import compiling, device

    recorder = Recorder(capability=capability)
    package = types.ModuleType("flashinfer")
    modules = {"decode": types.ModuleType("flashinfer.decode"), "prefill": types.ModuleType("flashinfer.prefill")}
    bodies = {
        "xqa_batch_decode_with_kv_cache": ("decode", xqa),
        "trtllm_batch_decode_with_kv_cache": ("decode", gen_decode),
        "trtllm_batch_context_with_kv_cache": ("prefill", gen_context),
        "trtllm_fmha_v2_prefill": ("prefill", fmha_v2),
    }
    for name, parameters in functions(version).items():
        module, body = bodies[name]
        setattr(modules[module], name, with_signature(name, parameters, body, recorder))
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", module)
    monkeypatch.setattr(device, "capability", lambda _: capability)
    monkeypatch.setattr(device, "processors", lambda _: 132)
    monkeypatch.setattr(compiling, "loaded", set())
    return recorder


def with_signature(name: str, parameters: list[str], body: Any, recorder: Recorder) -> Any:
    """A function with these parameters that records the call and runs `body` with what was passed."""

    def run(passed: dict[str, Any]) -> Any:
        given = {key: value for key, value in passed.items() if value is not None}
        recorder.calls.append((name, given))
        return body(recorder, given)

    space: dict[str, Any] = {"run": run}
    exec(f"def {name}({', '.join(parameters)}):\n    return run(dict(locals()))\n", space)
    return space[name]


# --- the arithmetic -------------------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    return float(value)


def plain(tensor: torch.Tensor, blocks: torch.Tensor | None = None) -> torch.Tensor:
    """Stored elements as float64."""
    if blocks is not None:
        return dequantize(tensor, blocks, "fp4").double()
    return dequantize(tensor, None, "fp8_e4m3").double() if tensor.element_size() == 1 else tensor.double()


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """q[S, Hq, D] over k, v [L, Hk, D]: (out[S, Hq, D], natural lse[S, Hq])."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    logits = torch.einsum("shd,lhd->hsl", q, k) * rule["scale"]
    if rule.get("softcap"):
        logits = rule["softcap"] * torch.tanh(logits / rule["softcap"])
    position = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))[None]
    seen = key <= position if rule.get("mask") is None else draft_mask(rule["mask"], len(q), len(k))
    if rule.get("window_left", -1) >= 0:
        seen = seen & (key >= position - rule["window_left"])
    if rule.get("chunk"):
        seen = seen & (key // rule["chunk"] == position // rule["chunk"])
    logits = logits.masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1)
    if rule.get("sinks") is not None:
        lse = torch.logaddexp(lse, rule["sinks"].double()[:, None])
    weights = (logits - lse[..., None]).exp()
    return torch.einsum("hsl,lhd->shd", weights, v), lse.T


def draft_mask(bits: torch.Tensor, drafts: int, keys: int) -> torch.Tensor:
    """bool[S, L] from u16[S, words]: the prefix is seen, drafts by their bits."""
    seen = torch.ones(drafts, keys, dtype=torch.bool)
    words = bits.to(torch.int32).tolist()
    for i in range(drafts):
        for j in range(drafts):
            seen[i, keys - drafts + j] = bool(words[i][j // 16] >> (j % 16) & 1)
    return seen


def gather(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[length, Hk, D] of one row from [pages, P, Hk, D]."""
    need = -(-length // pages.shape[1])
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages
    return raw[table[:need].long()].flatten(0, 1)[:length].view(pages.dtype)


def check_addresses(a: dict[str, Any], page: int, longest: int) -> list[int]:
    """What every kernel assumes of tables and lengths; the lengths."""
    require(page in (16, 32, 64, 128), f"page {page}")
    table, lens = a["block_tables"], a["seq_lens"]
    require(table.dtype == torch.int32 and table.is_contiguous(), "a block table is contiguous int32")
    require(
        lens.dtype == torch.int32 and lens.is_contiguous() and len(lens) == len(table), "lengths are int32, one a row"
    )
    values = [int(n) for n in lens]
    require(
        all(1 <= n <= min(longest, table.shape[-1] * page) for n in values), f"lengths {values} of at most {longest}"
    )
    return values


# --- the functions --------------------------------------------------------------------------------------------------------


def xqa(recorder: Recorder, a: dict[str, Any]) -> torch.Tensor:
    q, (k, v), width = a["query"], a["kv_cache"], a["q_len_per_req"]
    recorder.owns(a["workspace_buffer"], "xqa")
    require(not a["workspace_buffer"][:SEMAPHORES].any(), "semaphores start at zero")
    require(a["workspace_buffer"].numel() > SEMAPHORES, "scratch lies behind the semaphores")
    require(k.stride() == v.stride() and k.stride(-1) == 1, "one set of strides for K and V")
    require(q.is_contiguous() and a["out"].is_contiguous() and a["out"].dtype == q.dtype, "contiguous q and out")
    require(q.dtype in (torch.bfloat16, torch.float16), "queries are 16 bit")
    require(k.dtype in (q.dtype, torch.float8_e4m3fn), "keys as queries, or e4m3")
    require(a["kv_layout"] == "NHD" and (width > 1) == ("mask" in a), "drafts come with a mask")
    ragged = a.get("q_cu_seq_lens")
    hopper = ragged is None and k.dtype == torch.float8_e4m3fn and recorder.capability[0] == 9
    lens = check_addresses(a, k.shape[1], a["max_seq_len"])
    offsets = list(range(0, len(q) + 1, width)) if ragged is None else ragged.tolist()
    require(len(offsets) == len(lens) + 1 and offsets[-1] == len(q), "queries of every row")
    require(
        all(c - b <= width for b, c in zip(offsets, offsets[1:], strict=False)),
        "no row has more queries than the bound",
    )
    masks = None if width == 1 else a["mask"].view(-1, a["mask"].shape[-1])
    require(
        masks is None or (masks.shape == (len(q), 2 * -(-width // 32)) and masks.dtype == torch.uint16),
        "a mask a query",
    )
    rule = {"scale": number(a["bmm1_scale"]), "window_left": a["window_left"], "sinks": a.get("sinks")}
    for row, length in enumerate(lens):
        at = slice(offsets[row], offsets[row + 1])
        rule["mask"] = None if masks is None else masks[at]
        keys = [plain(gather(x, a["block_tables"][row], length)) for x in (k, v)]
        if hopper:  # the Hopper kernel multiplies whole pages, and rounds queries
            page = gather(v, a["block_tables"][row], -(-length // v.shape[1]) * v.shape[1])
            require(bool(plain(page).isfinite().all()), "what follows the last key is finite")
        a["out"][at] = (attend_row(q[at].double(), *keys, rule)[0] * number(a["bmm2_scale"])).to(a["out"].dtype)
    return a["out"]


def fmha_v2(recorder: Recorder, a: dict[str, Any]) -> torch.Tensor:
    q, pool = a["qkv"]
    recorder.owns(a["workspace_buffer"], "fmha_v2")
    require(isinstance(a["bmm1_scale"], float) and isinstance(a["bmm2_scale"], float), "scales are host floats")
    require(q.is_contiguous() and a["out"].is_contiguous(), "strides are derived from shapes")
    heads_first = a["input_layout"] == "Q_PAGED_KV_HND"
    k, v = blocks_of(pool, a["block_tables"], heads_first)
    first = pool if isinstance(pool, torch.Tensor) else pool[0]
    require(q.dtype == first.dtype, "keys have the type of the queries")
    shape = first.shape
    lens = check_addresses(a, shape[-2] if heads_first else shape[-3], a["max_kv_len"])
    offsets = a["cum_seq_lens_q"].tolist()
    require(offsets[-1] == len(q) and a["cum_seq_lens_kv"].tolist()[-1] == sum(lens), "offsets cover queries and keys")
    require(
        max(b - c for b, c in zip(offsets[1:], offsets, strict=False)) <= a["max_q_len"] <= a["max_kv_len"], "bounds"
    )
    rule = {
        "scale": a["bmm1_scale"],
        "softcap": a.get("logits_soft_cap_scale"),
        "sinks": a.get("sinks"),
        "window_left": a["window_left"] if a["mask_mode"] == "sliding_window" else -1,
        "chunk": a["chunked_attention_size"] if a["mask_mode"] == "chunked" else 0,
    }
    require(not rule["chunk"] & (rule["chunk"] - 1), "chunks are powers of two")
    for row, length in enumerate(lens):
        at = slice(offsets[row], offsets[row + 1])
        pages = [torch.cat(x[row][: -(-length // x[row][0].shape[0])]) for x in (k, v)]
        require(
            bool(plain(pages[1]).isfinite().all()),
            "whole pages of V are multiplied: what follows the last key is finite",
        )
        keys = [plain(page[:length]) for page in pages]
        a["out"][at] = (attend_row(plain(q[at]), *keys, rule)[0] * a["bmm2_scale"]).to(a["out"].dtype)
    return a["out"]


def blocks_of(pool: Any, table: torch.Tensor, heads_first: bool) -> tuple[list[Any], list[Any]]:
    """The K and V blocks [P, Hk, D] of each row and column, found as the kernel finds them: base address plus block number."""
    if isinstance(pool, torch.Tensor):
        require(pool.dim() == 5 and pool.shape[1] == 2 and pool.is_contiguous(), "a stacked pool is contiguous")
        require(table.dim() == 2, "a stacked pool takes a plain table")
        base, block = pool.data_ptr(), pool[0, 0]
        numbers = [[[2 * page + side for page in line] for line in table.tolist()] for side in (0, 1)]
    else:
        lower, upper = pool
        require(lower.is_contiguous() and upper.is_contiguous() and lower.shape == upper.shape, "two contiguous pools")
        require(table.dim() == 3 and table.shape[1] == 2, "two pools take an expanded table")
        base, block = lower.data_ptr(), lower[0]
        distance, rest = divmod(upper.data_ptr() - base, block.numel() * block.element_size())
        require(distance > 0 and not rest, "the second pool lies whole blocks above the first")
        numbers = [[line[side] for line in table.tolist()] for side in (0, 1)]

    def read(number: int) -> torch.Tensor:
        """One block straight from memory."""
        nbytes = block.numel() * block.element_size()
        raw = (ctypes.c_uint8 * nbytes).from_address(base + number * nbytes)
        found = torch.frombuffer(raw, dtype=torch.uint8).view(block.dtype).view(block.shape).clone()
        return found.transpose(0, 1) if heads_first else found

    k, v = ([[read(number) for number in line] for line in side] for side in numbers)
    return k, v


def gen_row(a: dict[str, Any], line: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [length, Hk, D] of one row in float64, with block scales undone as the kernels read them."""
    (k, v), scales = a["kv_cache"], a.get("kv_cache_sf")
    pages = line[: -(-length // k.shape[2])].long()
    k, v = (x.view(torch.uint8)[pages].view(x.dtype) if x.element_size() == 1 else x[pages] for x in (k, v))
    blocks: list[torch.Tensor | None] = [None, None]
    if scales is not None:
        require(all(s.dtype == torch.float8_e4m3fn and s[0, 0].is_contiguous() for s in scales), "scales of fp4")
        n, heads, page, width = (len(pages), *scales[1].shape[1:])
        k_scales, v_scales = (s.view(torch.uint8)[pages] for s in scales)
        turned = v_scales.reshape(n, heads, page // 4, width, 4).transpose(3, 4).reshape(n, heads, page, width)
        blocks = [s.contiguous().view(torch.float8_e4m3fn) for s in (k_scales, turned)]
    found = [
        plain(x.contiguous(), b).transpose(1, 2).flatten(0, 1)[:length] for x, b in zip((k, v), blocks, strict=True)
    ]
    return found[0], found[1]


def gen(recorder: Recorder, a: dict[str, Any], offsets: list[int], longest: int) -> Any:
    q = a["query"]
    recorder.owns(a["workspace_buffer"], "trtllm-gen")
    if "multi_ctas_kv_counter_buffer" in a:
        require(not a["multi_ctas_kv_counter_buffer"].any(), "counters start at zero")
    narrow = a["kv_cache"][0].element_size() == 1
    require((q.dtype == torch.float8_e4m3fn) == narrow, "fp8 queries with 8 and 4 bit keys")
    require(a["kv_layout"] == "HND" and all(x.stride(-1) == 1 for x in a["kv_cache"]), "heads before tokens")
    lens = check_addresses(a, a["kv_cache"][0].shape[2], longest)
    rule = {"scale": number(a["bmm1_scale"]), "window_left": a["window_left"], "sinks": a.get("sinks")}
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    for row, length in enumerate(lens):
        at = slice(offsets[row], offsets[row + 1])
        keys = gen_row(a, a["block_tables"][row], length)
        out, natural = attend_row(plain(q[at]), *keys, rule)
        a["out"][at] = (out * number(a["bmm2_scale"])).to(a["out"].dtype)
        lse[at] = (natural / LN2).float()
    return (a["out"], lse) if a["return_lse"] else a["out"]


def gen_decode(recorder: Recorder, a: dict[str, Any]) -> Any:
    require(a["backend"] == "trtllm-gen", "the backend is named: auto decides by itself")
    width = a["q_len_per_req"]
    return gen(recorder, a, list(range(0, len(a["query"]) + 1, width)), a["max_seq_len"])


def gen_context(recorder: Recorder, a: dict[str, Any]) -> Any:
    require(a["batch_size"] == len(a["seq_lens"]), "rows")
    return gen(recorder, a, a["cum_seq_lens_q"].tolist(), a["max_kv_len"])
