"""The adapter's own decisions: placements, masks, refusals, compilation, workspaces, static buffers."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from trtllm_fake import SEMAPHORES, draft_mask, install, on_cpu

from attn_core.context import GraphLimits
from attn_core.errors import BatchError, BindError, GraphError
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaCache, Scale
from attn_core.testing.batches import make_case
from attn_core.testing.compare import compare_out, tolerance
from attn_core.testing.oracle_mha import attend
from attn_trtllm import compiling
from attn_trtllm.block_scales import interleave
from attn_trtllm.library import Function
from attn_trtllm.placement import collect, expand, place
from attn_trtllm.steps import chain_mask

GEOMETRY = MhaGeometry(4, 2, 64, 64, 0.2)
LENS = {"query_lens": (3, 20, 1), "kv_lens": (3, 50, 17), "page_size": 16, "dtype": "bf16"}


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    return install(monkeypatch)


def judge(case, result) -> None:
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    limit = tolerance(case.spec.dtype, case.spec.kv, case.spec.out).out
    assert compare_out(result.out, want, limit, case.batch.num_tokens) is None


# --- placements -----------------------------------------------------------------------------------------------------------


def moved(cache: MhaCache, how: str, heads_first: bool) -> MhaCache:
    """The same cache as one stacked pool, or as two pools in one allocation, V above or below K."""
    k, v = (t.transpose(1, 2).contiguous() if heads_first else t for t in (cache.k, cache.v))
    pages = len(k)
    if how == "stacked":
        k, v = torch.stack((k, v), 1).unbind(1)
    else:
        room = torch.zeros((2 * pages + 3, *k.shape[1:]), dtype=k.dtype)
        first, second = (0, pages + 3) if how == "above" else (pages + 3, 0)
        room[first : first + pages], room[second : second + pages] = k, v
        k, v = room[first : first + pages], room[second : second + pages]
    return MhaCache(k.transpose(1, 2), v.transpose(1, 2)) if heads_first else MhaCache(k, v)


@pytest.mark.parametrize("heads_first", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("how", ["stacked", "above", "below", "separate"])
@pytest.mark.parametrize("finite", [True, False])
def test_fmha_v2_reads_every_placement(recorder, finite, how, heads_first):
    poison = "zero" if finite else "nan"
    case = make_case(GEOMETRY, "prefill", storage="hnd" if heads_first else "separate", unused=poison, **LENS)
    session = on_cpu().open(case, "fmha_v2", options={"finite_pool": finite})
    session.store(case)
    if how != "separate":
        case.cache = moved(case.cache, how, heads_first)
    judge(case, session.run(case, store=False))
    call = recorder.calls[-1][1]
    if how == "separate":
        return
    assert call["input_layout"] == ("Q_PAGED_KV_HND" if heads_first else "Q_PAGED_KV_NHD")
    stacked = how == "stacked" and finite
    assert isinstance(call["qkv"][1], torch.Tensor) == stacked
    assert call["block_tables"].dim() == (2 if stacked else 3)


def test_a_distance_of_part_of_a_block_is_copied_with_a_warning_once(recorder, caplog):
    case = make_case(GEOMETRY, "prefill", **LENS)
    session = on_cpu().open(case, "fmha_v2")
    session.store(case)
    pages = len(case.cache.k)
    room = torch.zeros(2 * pages * case.cache.k[0].numel() + 64, dtype=torch.bfloat16)
    k = room[: case.cache.k.numel()].view(case.cache.k.shape).copy_(case.cache.k)
    v = room[case.cache.k.numel() + 64 :].view(case.cache.v.shape).copy_(case.cache.v)
    case.cache = MhaCache(k, v)
    assert place(case.cache).kind == "scattered"
    with caplog.at_level(logging.WARNING, "attn_core"):
        judge(case, session.run(case, store=False))
        judge(case, session.run(case, store=False))
    assert sum("copies the pages" in line for line in caplog.messages) == 1


def test_tables_count_blocks_from_the_lower_pool():
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    assert expand(table, (5, 0), 1).tolist() == [[[8, 6], [3, 1]]]
    cache = MhaCache(torch.arange(8.0).view(4, 1, 1, 2), torch.arange(8.0, 16.0).view(4, 1, 1, 2))
    pool, numbers = collect(cache, table, None)
    assert pool[:, :, 0, 0].tolist() == [[[6, 7], [14, 15]], [[2, 3], [10, 11]]]
    assert numbers.tolist() == [[0, 1]]


def test_a_single_head_and_a_single_page_have_free_strides():
    k = torch.zeros(5, 2, 16, 1, 8)
    assert place(MhaCache(k[:, 0], k[:, 1])).kind == "stacked"
    assert place(MhaCache(torch.zeros(0, 16, 1, 8), torch.zeros(0, 16, 1, 8))).kind == "scattered"


# --- masks and scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 16, 17, 32, 33, 40])
def test_the_mask_of_a_chain_is_causal_bit_by_bit(width):
    mask = chain_mask(2, width, torch.device("cpu"))
    assert mask.shape == (2, width, 2 * -(-width // 32))
    assert (mask.dtype, mask.is_contiguous()) == (torch.uint16, True)
    seen = draft_mask(mask[1], width, width)
    assert torch.equal(seen, torch.ones(width, width, dtype=torch.bool).tril())


def test_metadata_copies_nothing_from_the_host(recorder, monkeypatch):
    """A copy of pageable memory waits for the device: masks and offsets are made where they are used."""

    def refuse(*arguments, **fields):
        raise AssertionError("a tensor was made from host data")

    fields = {"page_size": 16, "dtype": "bf16", "kv_dtype": "fp8_e4m3"}
    cases = [make_case(GEOMETRY, "verify", query_lens=(3, 3), kv_lens=(20, 9), **fields)]
    cases.append(make_case(GEOMETRY, "decode", kv_lens=(20, 9), **fields))
    for case in cases:
        session = on_cpu().open(case, "xqa")
        with monkeypatch.context() as patched:
            for name in ("tensor", "as_tensor", "from_numpy"):
                patched.setattr(torch, name, refuse)
            metadata = session.metadata(case.batch, case.phase)
        session.store(case)
        judge(case, session.attend(case, metadata, case.out))
        assert session.metadata(case.batch, case.phase).mask.data_ptr() == metadata.mask.data_ptr()


def test_block_scales_of_v_are_turned_by_four_tokens_and_those_of_k_are_not():
    scales = torch.arange(8 * 4, dtype=torch.uint8).view(1, 1, 8, 4)
    turned = interleave(scales).flatten()
    for token in range(8):
        for block in range(4):
            assert int(turned[token // 4 * 16 + block * 4 + token % 4]) == 4 * token + block


def test_scales_of_single_heads_are_refused(recorder):
    case = make_case(
        GEOMETRY, "decode", kv_lens=(5,), page_size=16, dtype="bf16", kv_dtype="fp8_e4m3", k_scale=(0.5, 2.0)
    )
    with pytest.raises(BindError, match="one k_scale a layer"):
        on_cpu().open(case, "xqa").run(case)


@pytest.mark.parametrize(
    "change", ["none", "no out", "other cache", "k scale", "v scale", "strided q", "wide out", "strided out"]
)
def test_decode_takes_the_short_way_only_where_nothing_is_left_to_do(recorder, monkeypatch, change):
    """The short way makes the call of the long one; whatever needs a conversion, a scale or a look at the cache goes the long way."""
    case = make_case(GEOMETRY, "decode", kv_lens=(3, 50, 17), page_size=16, dtype="bf16", storage="separate")
    session = on_cpu().open(case, "xqa")
    metadata = session.metadata(case.batch, case.phase)
    session.store(case)
    session.attend(case, metadata, case.out)  # fixes the step
    before, backend, ways = dict(recorder.calls[-1][1]), session.bound.backend, []
    out = torch.full_like(case.out, torch.nan)
    if change == "other cache":
        case.cache = MhaCache(case.cache.k.clone(), case.cache.v.clone())
    elif change.endswith("scale"):
        setattr(case.layer, change.replace(" ", "_"), Scale(torch.tensor([0.5]), 0.5))
    elif change == "strided q":
        case.inputs = case.inputs._replace(q=torch.stack((case.inputs.q, case.inputs.q), -1)[..., 0])
    elif change == "wide out":
        out = out.float()
    elif change == "strided out":
        out = torch.stack((out, out), -1)[..., 0]
    whole = type(backend).attend
    monkeypatch.setattr(backend, "attend", lambda *given: ways.append(change) or whole(backend, *given))
    result = session.attend(case, metadata, None if change == "no out" else out)
    assert ways == ([] if change == "none" else [change])
    after = recorder.calls[-1][1]
    assert after.keys() == before.keys() - (
        {"mask"} if change == "none" else set()
    )  # there is none: left to its default
    if change == "none":
        assert result.out is out
        assert all(
            after[name] is value or after[name] == value
            for name, value in before.items()
            if name not in ("out", "kv_cache", "mask")
        )
    if not change.endswith("scale"):
        judge(case, result)
    else:
        assert (
            after["bmm1_scale" if change == "k scale" else "bmm2_scale"]
            != before["bmm1_scale" if change == "k scale" else "bmm2_scale"]
        )


def test_the_scale_of_8_bit_queries_does_not_touch_wider_ones(recorder):
    case = make_case(GEOMETRY, "decode", kv_lens=(3, 50, 17), page_size=16, dtype="bf16")
    case.layer.q_scale = Scale(torch.tensor([0.5]), 0.5)
    judge(case, on_cpu().open(case, "xqa").run(case))


@pytest.mark.parametrize("hidden", ["k", "v", "q", "kqv"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("fp8_e4m3", "fp8_e4m3"), ("bf16", "bf16")])
def test_scales_that_only_the_device_knows_stay_there_in_prefill(
    recorder, monkeypatch, caplog, dtype, kv_dtype, hidden
):
    """The kernel takes host numbers: other scales go into the query and the result; e4m3 pages are widened for that."""
    case = make_case(
        GEOMETRY, "prefill", query_lens=(5, 2), kv_lens=(20, 33), dtype=dtype, kv_dtype=kv_dtype, page_size=16,
        k_scale=0.375, v_scale=2.5, q_scale=4.0,
    )  # fmt: skip
    for name in hidden:
        scale = getattr(case.layer, f"{name}_scale")
        setattr(case.layer, f"{name}_scale", Scale(scale.tensor))
    session = on_cpu().open(case, "fmha_v2")
    metadata = session.metadata(case.batch, case.phase)
    session.store(case)

    def refuse(self, *arguments):
        raise AssertionError("a number was read back from the device, inside a step")

    backend = session.bound.backend
    with monkeypatch.context() as patched:
        patched.setitem(backend.functions, "trtllm_fmha_v2_prefill", Function(lambda **arguments: None, frozenset()))
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
            patched.setattr(torch.Tensor, name, refuse)
        session.attend(case, metadata, torch.empty_like(case.out))
    with caplog.at_level(logging.WARNING):
        result = session.attend(case, metadata, case.out)
    judge(case, result)
    call = recorder.calls[-1][1]
    assert isinstance(call["bmm1_scale"], float)
    assert isinstance(call["bmm2_scale"], float)
    widened = dtype == "fp8_e4m3" and hidden != "v"
    assert call["qkv"][0].dtype == (torch.bfloat16 if widened or dtype == "bf16" else torch.float8_e4m3fn)
    assert ("Scale.value" in caplog.text) == widened


def test_a_scale_on_the_device_stays_there_in_decode(recorder):
    case = make_case(
        GEOMETRY, "decode", kv_lens=(5, 20), dtype="bf16", kv_dtype="fp8_e4m3", page_size=16, k_scale=0.5, v_scale=2.0
    )
    case.layer.k_scale = Scale(case.layer.k_scale.tensor)
    judge(case, on_cpu().open(case, "xqa").run(case))
    assert isinstance(recorder.calls[-1][1]["bmm1_scale"], torch.Tensor)


@pytest.mark.parametrize(("phase", "queries"), [("decode", (1, 1)), ("verify", (4, 4))])
def test_e4m3_caches_on_hopper_are_read_by_the_generic_kernel(recorder, phase, queries):
    """As a ragged batch, with a mask for every query: the Hopper kernel rounds queries and multiplies unused slots."""
    case = make_case(
        GEOMETRY, phase, query_lens=queries, kv_lens=(5, 40), page_size=16, dtype="bf16", kv_dtype="fp8_e4m3"
    )
    judge(case, on_cpu().open(case, "xqa").run(case))
    call = recorder.calls[-1][1]
    assert call["q_cu_seq_lens"].tolist() == [0, queries[0], 2 * queries[0]]
    assert call["q_len_per_req"] == max(2, queries[0])
    assert call["mask"].shape == (sum(queries), 2)


def test_the_hopper_kernel_is_an_option_for_finite_pools(recorder):
    fields = {"kv_lens": (5, 40), "page_size": 16, "dtype": "bf16", "kv_dtype": "fp8_e4m3", "unused": "zero"}
    case = make_case(GEOMETRY, "decode", **fields)
    on_cpu().open(case, "xqa", options={"hopper_fp8": True, "finite_pool": True}).run(case)
    assert "q_cu_seq_lens" not in recorder.calls[-1][1]
    with pytest.raises(BindError, match="finite_pool"):
        on_cpu().open(case, "xqa", options={"hopper_fp8": True})


def test_other_gpus_have_one_kernel_for_e4m3_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    recorder = install(monkeypatch, capability=(12, 0))
    case = make_case(GEOMETRY, "decode", kv_lens=(5,), page_size=16, dtype="bf16", kv_dtype="fp8_e4m3")
    judge(case, on_cpu().open(case, "xqa").run(case))
    assert "q_cu_seq_lens" not in recorder.calls[-1][1]


def test_a_library_without_ragged_queries_is_refused_for_e4m3_caches_on_hopper(monkeypatch):
    install(monkeypatch, "0.6.13")
    case = make_case(GEOMETRY, "decode", kv_lens=(5,), page_size=16, dtype="bf16", kv_dtype="fp8_e4m3")
    with pytest.raises(BindError, match="ragged"):
        on_cpu().open(case, "xqa")


# --- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "capability"), [("xqa", (10, 0)), ("fmha_v2", (8, 0)), ("trtllm-gen", (9, 0))])
def test_a_variant_is_not_created_on_another_gpu(monkeypatch, variant, capability):
    recorder = install(monkeypatch, capability=capability)
    case = make_case(GEOMETRY, "prefill", **LENS)
    with pytest.raises(BindError, match=f"sm{capability[0]}{capability[1]}"):
        on_cpu().open(case, variant)
    assert recorder.calls == []


def test_no_variant_is_created_without_a_gpu():
    case = make_case(GEOMETRY, "prefill", **LENS)
    with pytest.raises(BindError, match="NVIDIA"):
        on_cpu().open(case, "xqa")


def test_hopper_never_reaches_functions_that_download(recorder):
    """Every phase of both variants for sm90: no call of a trtllm-gen function, and no backend left to the library."""
    for variant, phases in (("xqa", ("decode", "draft", "verify")), ("fmha_v2", ("prefill", "draft_extend"))):
        for phase in phases:
            queries = (1, 1) if phase in ("decode", "draft") else (3, 3)
            case = make_case(GEOMETRY, phase, query_lens=queries, kv_lens=(3, 40), page_size=16, dtype="bf16")
            judge(case, on_cpu().open(case, variant).run(case))
    assert {name for name, _ in recorder.calls} == {"xqa_batch_decode_with_kv_cache", "trtllm_fmha_v2_prefill"}


def test_chunks_that_the_kernel_cannot_take_are_refused(recorder):
    for geometry in (MhaGeometry(4, 2, 64, 64, 0.2, chunk=48), MhaGeometry(4, 2, 64, 64, 0.2, chunk=64, window=8)):
        with pytest.raises(BindError, match="power of two"):
            on_cpu().open(make_case(geometry, "prefill", **LENS), "fmha_v2")


def test_unequal_widths_and_trimmed_pools_are_refused(recorder):
    with pytest.raises(BindError, match="one width"):
        on_cpu().open(
            make_case(MhaGeometry(4, 2, 64, 32, 0.2), "decode", kv_lens=(5,), page_size=16, dtype="bf16"), "xqa"
        )
    windowed = MhaGeometry(4, 2, 64, 64, 0.2, window=4)
    case = make_case(windowed, "decode", kv_lens=(40,), page_size=16, dtype="bf16", origins=(16,))
    with pytest.raises(BatchError, match="trimmed"):
        on_cpu().open(case, "xqa").run(case)


def test_xqa_refuses_strides_that_differ(recorder):
    case = make_case(GEOMETRY, "decode", kv_lens=(5,), page_size=16, dtype="bf16")
    case.cache.v = case.cache.v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(BindError, match="same strides"):
        on_cpu().open(case, "xqa").run(case)


# --- compilation ----------------------------------------------------------------------------------------------------------


def no_capture() -> bool:
    return False


def test_a_compilation_is_announced_before_it_starts_and_only_once_a_machine(recorder, caplog, monkeypatch):
    said: list[bool] = []
    log = logging.getLogger("attn_core")
    with caplog.at_level(logging.INFO, "attn_core"):
        for _ in range(2):
            compiling.run("k", "a minute", log, no_capture, lambda: said.append("compiling k" in caplog.text), {})
        monkeypatch.setattr(compiling, "loaded", set())  # another process of the same machine
        caplog.clear()
        compiling.run("k", "a minute", log, no_capture, lambda: said.append("compiling k" in caplog.text), {})
    assert said == [True, True, False]


def test_a_failed_compilation_leaves_nothing_behind(recorder, caplog):
    def fail() -> None:
        raise RuntimeError("nvcc")

    log = logging.getLogger("attn_core")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nvcc"):
            compiling.run("k", "a minute", log, no_capture, fail, {})
    assert caplog.text.count("compiling k") == 2


def test_two_threads_compile_once(recorder, caplog):
    log, calls, start = logging.getLogger("attn_core"), [], threading.Barrier(2)

    def work() -> None:
        start.wait()
        compiling.run("k", "a minute", log, no_capture, lambda: calls.append(1), {})

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), caplog.text.count("compiling k")) == (2, 1)


def test_a_capture_does_not_compile(recorder):
    log = logging.getLogger("attn_core")
    with pytest.raises(GraphError, match="attn warmup"):
        compiling.run("k", "a minute", log, lambda: True, lambda: None, {})
    compiling.run("k", "a minute", log, no_capture, lambda: None, {})
    compiling.run("k", "a minute", log, lambda: True, lambda: None, {})


@pytest.mark.parametrize(
    ("variant", "phases", "kv", "storage"),
    [
        ("xqa", ("decode", "draft", "verify"), "fp8_e4m3", "separate"),
        ("fmha_v2", ("prefill", "draft_extend"), "bf16", "hnd"),
        ("trtllm-gen", ("prefill", "decode", "verify"), "fp4", "hnd"),
    ],
)
def test_warm_up_loads_the_kernels_that_steps_use(monkeypatch, tmp_path, variant, phases, kv, storage):
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    recorder = install(monkeypatch, capability=(10, 0) if variant == "trtllm-gen" else (9, 0))
    limits = GraphLimits((1,), 8, 4, 64, 8)
    geometry = MhaGeometry(4, 2, 64, 64, 0.2, sinks=True)
    loaded = []
    for phase in phases:
        queries = (4,) if phase == "verify" else (1,)
        q = "fp8_e4m3" if kv == "fp4" else "bf16"
        case = make_case(geometry, phase, query_lens=queries, kv_lens=(20,), page_size=16, dtype=q, kv_dtype=kv, storage=storage, sinks=(0.0,) * 4)  # fmt: skip
        session = on_cpu().open(case, variant, phases=phases)
        session.call("attn_warmup", case.group, (phase,), limits)
        loaded.append(len(compiling.loaded))
        session.run(case)
        if storage != "separate" and variant == "fmha_v2":
            continue  # the case's own pools lie apart on this machine by chance
        assert len(compiling.loaded) == loaded[-1]
    assert len(recorder.calls) == 2 * len(phases)


# --- workspaces and graphs ------------------------------------------------------------------------------------------------


def test_workspaces_are_zeroed_once_and_never_shared_between_lanes_or_variants(recorder):
    cases = [make_case(GEOMETRY, "decode", kv_lens=(5,), page_size=16, dtype="bf16", lane=lane) for lane in (0, 1)]
    session = on_cpu().open(cases[0], "xqa", lanes=2)
    for case in (*cases, *cases):
        session.run(case)
    prefill = make_case(GEOMETRY, "prefill", **LENS)
    on_cpu().open(prefill, "fmha_v2").run(prefill)
    spaces = [arguments["workspace_buffer"].data_ptr() for _, arguments in recorder.calls]
    assert spaces[:2] == spaces[2:4]
    assert len(set(spaces)) == 3
    assert recorder.calls[0][1]["workspace_buffer"].numel() > SEMAPHORES


def test_static_metadata_stays_where_it_is_and_padded_rows_keep_a_key_for_each_query(recorder):
    case = make_case(
        GEOMETRY, "verify", query_lens=(3, 3), kv_lens=(20, 9), page_size=16, dtype="bf16", pad_rows=2, pad_kv_len=1
    )
    session = on_cpu().open(case, "xqa", limits=GraphLimits((4,), 16, 4, 64, 24))
    state = session.graph_state(GraphLimits((4,), 16, 4, 64, 24), ("verify",))
    first = session.metadata(case.batch, "verify", state, True)
    at = first.table.data_ptr(), first.kv_lens.data_ptr(), first.mask.data_ptr()
    assert first.kv_lens.tolist() == [20, 9, 3, 3]
    assert session.metadata(case.batch, "verify", state) is first
    assert at == (first.table.data_ptr(), first.kv_lens.data_ptr(), first.mask.data_ptr())
    assert first.table.shape == (4, 4)
    assert state.nbytes == 4 * 4 * 4 + 4 * 4


def test_eager_steps_leave_padded_rows_out(recorder):
    case = make_case(GEOMETRY, "decode", kv_lens=(5, 20), page_size=16, dtype="bf16", pad_rows=3)
    result = on_cpu().open(case, "xqa").run(case)
    assert result.out.shape[0] == 5
    assert len(recorder.calls[-1][1]["seq_lens"]) == 2


def test_the_package_has_no_module_level_state_but_loaded_kernels():
    import attn_trtllm.backend
    import attn_trtllm.steps

    for module in (attn_trtllm.backend, attn_trtllm.steps):
        text = Path(module.__file__).read_text(encoding="utf-8")
        assert "global " not in text
