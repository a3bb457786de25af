"""Support tables: how each cell is read off manifest rows, and how tables are compared."""

from __future__ import annotations

import pytest

from attn_core.manifest import Manifest, parse_manifest
from attn_core.matrix import CellDifference, compare_matrix, published_cells, published_matrix, support_matrix

ALL_PHASES = ["prefill", "decode", "verify", "draft"]
TYPES = [{"q": "bf16", "kv": "bf16"}]


def allow(features: list[str] | None = None, **when: object) -> dict[str, object]:
    """An allow row; conditions that are not given claim one plain case."""
    base = {"arch": ["sm90"], "phase": ALL_PHASES, "dtypes": TYPES, "page_size": [1], "head_dims": [[64, 64]]}
    return {"features": features or [], "when": {**base, **when}}


def backend(name: str, *rows: dict[str, object], kind: str = "mha", **more: object) -> Manifest:
    """A backend of one variant, or of the variants given in `more`."""
    variants = more.pop("variant", None) or [{"name": "default", "allow": list(rows)}]
    table = {"api": "1.0", "package": "attn-toy", "kind": kind, "name": name, "variant": variants, **more}
    return parse_manifest(table)


def cells(*manifests: Manifest, kind: str = "mha") -> dict[str, object]:
    """The cells of the first row of the table of `kind`."""
    return next(iter(support_matrix(manifests)[kind]["rows"].values()))["cells"]


@pytest.mark.parametrize(
    ("pages", "cell"),
    [
        ([1], False),
        ([1, 128], 128),
        (64, 64),
        ([64, 16], [16, 64]),
        ({"min": 1}, True),
        ({"min": 16, "multiple": 16, "max": 64}, True),
        ({"exactly": 64}, 64),
        ({"max": 1}, False),
    ],
)
def test_native_pages_of_mha(pages, cell):
    assert cells(backend("b", allow(page_size=pages)))["page_size_gt_1_native"] == cell
    assert type(cells(backend("b", allow(page_size=pages)))["page_size_gt_1_native"]) is type(cell)


@pytest.mark.parametrize(("pages", "cell"), [([64, 32], [32, 64]), ([1], [1]), ({"min": 1}, None)])
def test_native_pages_of_mla_count_absorbed_rows_only(pages, cell):
    variants = [
        {"name": "a", "roles": ["absorbed"], "allow": [allow(page_size=pages)]},
        {"name": "r", "roles": ["ragged"], "allow": [allow(["chunked_prefix"], page_size={"min": 1})]},
    ]
    found = cells(backend("b", kind="mla", variant=variants), kind="mla")
    assert found["native_page_sizes"] == cell
    assert found["chunked_prefix_cache"] is True


def test_cache_types_are_those_of_the_rows():
    kv = [{"q": "bf16", "kv": "bf16"}, {"q": "bf16", "kv": "fp8_e4m3"}]
    assert cells(backend("b", allow(dtypes=kv)))["fp8_kv"] is True
    assert cells(backend("b", allow(dtypes=kv)))["fp4_kv"] is False
    assert cells(backend("b", allow(dtypes=[{"q": "bf16", "kv": "nvfp4"}])))["fp4_kv"] is True


def test_a_backend_that_reads_nothing_but_fp8_says_so():
    rows = allow(dtypes=[{"q": "fp8_e4m3", "kv": "fp8_e4m3", "out": "bf16"}])
    assert cells(backend("b", rows))["fp8_kv"] == "required: fp8_e4m3"


def test_speculation_counts_in_verify_and_draft_only():
    serving = allow(["spec_topk1", "spec_tree"], phase=["prefill", "decode"])
    assert cells(backend("b", serving))["spec_topk_1"] is False
    found = cells(backend("b", allow(["spec_topk1"])))
    assert (found["spec_topk_1"], found["spec_topk_gt_1"]) == (True, False)


def test_trees_at_slots_only_are_a_condition_for_mla():
    variants = [
        {
            "name": "a",
            "roles": ["absorbed"],
            "allow": [allow(["spec_topk1"], page_size={"min": 1}), allow(["spec_tree"], page_size=[1])],
        }
    ]
    found = cells(backend("b", kind="mla", variant=variants), kind="mla")
    assert found["spec_topk_gt_1"] == "page_size=1 only"


def test_a_window_must_work_in_prefill_and_decode():
    prefill = allow(["sliding_window"], phase=["prefill"])
    assert cells(backend("b", prefill, allow(phase=["decode"])))["sliding_window"] is False
    assert cells(backend("b", prefill, allow(["sliding_window"], phase=["decode"])))["sliding_window"] is True


def test_multimodal_is_a_vision_backend_of_the_same_name():
    vision = backend("b", allow(), kind="mm")
    assert cells(backend("b", allow()), vision)["multimodal"] is True
    assert cells(backend("c", allow()), vision)["multimodal"] is False


def test_a_companion_brings_its_chunked_prefix():
    helper = backend(
        "h", kind="mla", variant=[{"name": "r", "roles": ["ragged"], "allow": [allow(["chunked_prefix"])]}]
    )
    main = backend("b", allow(), kind="mla", companion=[{"phase": "prefill", "backend": "h"}])
    assert support_matrix([main, helper])["mla"]["rows"]["b"]["cells"]["chunked_prefix_cache"] is True
    assert cells(main, kind="mla")["chunked_prefix_cache"] is False


def gdn(name: str, features: list[str], phase: list[str], **more: object) -> Manifest:
    hardware = {key: more.pop(key) for key in ("arch", "vendor") if key in more}
    row = {
        "features": features,
        "when": {**hardware, "phase": phase, "state_dtype": "fp32", "state_dims": [[128, 128]]},
    }
    return backend(name, row, kind="gdn", **more)


def test_linear_rows_are_named_by_device_and_by_architecture_where_rows_name_them():
    rows = support_matrix(
        [
            gdn("wide", ["spec_topk1", "spec_tree"], ALL_PHASES, vendor=["nvidia", "cpu"]),
            gdn("narrow", [], ["decode"], arch=["sm100", "sm90"]),
            gdn("other", [], ["decode"], arch=["gfx950", "a2", "gfx942"]),
            gdn("tiles", [], ["decode"], arch=["amx"]),
        ]
    )["gdn"]["rows"]
    assert list(rows) == [
        "wide@cuda",
        "wide@cpu",
        "narrow@cuda:sm90,sm100",
        "other@rocm:gfx942,gfx950",
        "other@npu:a2",
        "tiles@cpu:amx",
    ]
    assert rows["wide@cuda"]["cells"] == {"decode": True, "prefill": True, "target_verify": True}
    assert rows["narrow@cuda:sm90,sm100"]["cells"] == {"decode": True, "prefill": False, "target_verify": False}


def test_verify_of_chains_names_who_takes_the_trees():
    alone = gdn("b", ["spec_topk1"], ["verify"], vendor="nvidia")
    assert cells(alone, kind="gdn")["target_verify"] == "linear chain"
    helped = gdn("b", ["spec_topk1"], ["verify"], vendor="nvidia", companion=[{"phase": "verify", "backend": "c"}])
    assert cells(helped, kind="gdn")["target_verify"] == "linear chain; trees fall back to c"


def test_an_indexer_is_no_row_of_the_sparse_table():
    variants = [{"name": "i", "roles": ["index"], "allow": [allow()]}]
    assert support_matrix([backend("i", kind="dsa", variant=variants)])["dsa"]["rows"] == {}
    assert cells(backend("s", allow(phase=["prefill"]), kind="dsa"), kind="dsa") == {"prefill": True, "decode": False}


def test_rows_carry_status_and_package():
    row = support_matrix([backend("b", allow(), status="planned")])["mha"]["rows"]["b"]
    assert (row["status"], row["package"]) == ("planned", "attn-toy")


def test_every_table_has_the_published_columns():
    published = published_matrix()
    assert {kind: table["columns"] for kind, table in support_matrix([]).items()} == {
        kind: table["columns"] for kind, table in published.items() if isinstance(table, dict) and "columns" in table
    }
    assert len(list(published_cells(published))) == 192


@pytest.mark.parametrize(
    ("published", "pages", "verdict"),
    [
        (False, [16], "better"),
        (16, [16, 32], "better"),
        ([16, 32], [16], "worse"),
        (True, [16], "worse"),
        ([16], {"min": 1}, "better"),
        (True, [1], "worse"),
    ],
)
def test_verdict_on_a_cell(published, pages, verdict):
    have = support_matrix([backend("b", allow(page_size=pages))])
    table = {"mha": {"columns": ["page_size_gt_1_native"], "rows": {"b": [published]}}}
    (difference,) = compare_matrix(table, have)
    assert difference.verdict == verdict


def test_equal_cells_are_no_difference_and_a_lost_row_is_one():
    table = {"mha": {"columns": ["fp8_kv"], "rows": {"b": [False], "lost": [True]}}}
    assert compare_matrix(table, support_matrix([backend("b", allow())])) == [
        CellDifference("mha", "lost", "fp8_kv", True, None, "missing")
    ]


def test_one_is_not_true():
    table = {"mha": {"columns": ["page_size_gt_1_native"], "rows": {"b": [1]}}}
    assert compare_matrix(table, support_matrix([backend("b", allow(page_size={"min": 1}))]))
