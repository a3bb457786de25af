"""Binding: what a backend object must be, and that the functions on the hot path are the backend's own."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch

from attn_core import hookimpl
from attn_core.batch import AttentionBatch, DraftSteps, KvAddress, Segment
from attn_core.binding import BoundBackend, adapt, bind_backend
from attn_core.errors import BindError, GraphError
from attn_core.hookspecs import BACKEND_HOOKS, BackendSpec
from attn_core.layers import MmInputs
from attn_core.manifest import Manifest, load_toml, parse_manifests
from toy_plugins import manifest_text

# Plugin code is not type-checked against the hooks here: faulty signatures are the subject.
# mypy: disable-error-code="no-untyped-def"


class Plain:
    """A newcomer's backend: three functions."""

    @hookimpl
    def attn_metadata(self, batch, group, phase, state, capture):
        return (batch, group, phase, state, capture)

    @hookimpl
    def attn_extend(self, inputs, layer, cache, metadata, out):
        return ("extend", inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_decode(self, inputs, layer, cache, metadata, out):
        return ("decode", inputs, layer, cache, metadata, out)


def manifest(kind: str = "mha", **changes: str) -> Manifest:
    text = manifest_text("toy", kind=kind, variant=changes.pop("variant", ""))
    if kind in ("gdn", "mm"):
        text = text.replace("page_size = [16]", "")
    if kind == "gdn":
        text = text.replace('dtypes = [{ q = "bf16", kv = "bf16" }]', 'state_dtype = "fp32"\nstate_dims = [[128, 128]]')
    for old, new in (
        ("[[backend.variant.allow]]\n", changes.pop("allow", "")),
        ("[backend.variant.allow.when]\n", changes.pop("when", "")),
    ):
        text = text.replace(old, old + new)
    return parse_manifests(load_toml(text), package="attn-toy", version="1.2")[0]


def bind(backend: object, *phases: str, of: Manifest | None = None) -> BoundBackend:
    return bind_backend(backend, of or manifest(), "default", phases or ("prefill", "decode"))


def refusal(backend: object, *phases: str, of: Manifest | None = None) -> str:
    with pytest.raises(BindError) as caught:
        bind(backend, *phases, of=of)
    return str(caught.value)


# --- the hot path -------------------------------------------------------------------------------------------------------


def test_complete_hooks_are_the_bound_methods_themselves() -> None:
    backend = Plain()
    bound = bind(backend)
    for name in ("attn_metadata", "attn_extend", "attn_decode"):
        function = getattr(bound, name)
        assert function.__self__ is backend
        assert function.__func__ is vars(Plain)[name]
    assert bound.own == {"attn_metadata", "attn_extend", "attn_decode"}
    assert not bound.adapted
    assert bound.provides("attn_decode")
    assert not bound.provides("attn_store")


def test_every_hook_of_the_specification_is_bound() -> None:
    bound = bind(Plain())
    assert {name for name in BACKEND_HOOKS if callable(getattr(bound, name))} == set(BACKEND_HOOKS)


def test_an_older_backend_gets_the_arguments_it_takes() -> None:
    class Older(Plain):
        @hookimpl
        def attn_decode(self, metadata, inputs):
            return metadata, inputs

        @hookimpl
        def attn_metadata(self):
            return "metadata"

    bound = bind(Older())
    assert bound.attn_decode("inputs", "layer", "cache", "metadata", "out") == ("metadata", "inputs")
    assert bound.attn_metadata("batch", "group", "phase", None, False) == "metadata"
    assert bound.adapted == {"attn_decode", "attn_metadata"}
    assert bound.attn_extend(1, 2, 3, 4, 5) == ("extend", 1, 2, 3, 4, 5)


def test_a_hook_may_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later minor version adds an argument; a backend of today keeps working without it."""
    from attn_core import binding

    class Later:
        def attn_decode(self, inputs, layer, cache, metadata, out, extra): ...

    later = {"attn_decode": ("inputs", "layer", "cache", "metadata", "out", "extra")}
    monkeypatch.setattr(binding, "spec_arguments", lambda spec: later)
    function = adapt("attn_decode", Plain().attn_decode)
    assert function(1, 2, 3, 4, 5, "new") == ("decode", 1, 2, 3, 4, 5)


def test_all_arguments_in_another_order() -> None:
    class Turned(Plain):
        @hookimpl
        def attn_decode(self, out, metadata, cache, layer, inputs):
            return out, metadata, cache, layer, inputs

    assert bind(Turned()).attn_decode(1, 2, 3, 4, 5) == (5, 4, 3, 2, 1)


def test_inherited_static_and_wrapped_hooks() -> None:
    def timed(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    class Child(Plain):
        @hookimpl
        @timed
        def attn_decode(self, inputs, layer, cache, metadata, out):
            return "timed"

        @staticmethod
        @hookimpl
        def attn_warmup(group, phases, limits):
            return "warm"

    bound = bind(Child())
    assert bound.attn_decode(1, 2, 3, 4, 5) == "timed"
    assert bound.attn_warmup(1, 2, 3) == "warm"
    assert not bound.adapted


# --- refusals -----------------------------------------------------------------------------------------------------------


def test_c105_one_fact_a_line() -> None:
    class Bad(Plain):
        @hookimpl
        def attn_decode(self, inputs, layer, forward_batch):
            return None

    lines = refusal(Bad()).splitlines()
    assert lines[0] == "[AC-BIND-001] the backend object of mha/toy:default does not fit the contract"
    assert "  plugin     attn-toy 1.2" in lines
    assert "  hook       attn_decode" in lines
    (defined,) = (line for line in lines if "defined" in line)
    assert "attn_decode(self, inputs, layer, forward_batch)" in defined
    assert "test_binding.py:" in defined
    assert "  argument   forward_batch" in lines
    assert any("not an argument of attn_decode(inputs, layer, cache, metadata, out)" in line for line in lines)


def test_c105_missing_hook_of_a_phase() -> None:
    class OnlyDecode:
        attn_metadata = Plain.attn_metadata
        attn_decode = Plain.attn_decode

    bind(OnlyDecode(), "decode", "draft")
    text = refusal(OnlyDecode(), "decode", "prefill", "verify")
    assert "hook       attn_extend(inputs, layer, cache, metadata, out)" in text
    assert "missing: it serves phase verify" in text


def test_all_faults_at_once() -> None:
    class Bad:
        def attn_metadata(self, batch, group, phase, state, capture):
            return None

        @hookimpl
        def attn_decod(self, inputs, layer, cache, metadata, out):
            return None

        @hookimpl
        def attn_extend(self, inputs, *, layer):
            return None

        @hookimpl
        def attn_warmup(self, group=None):
            return None

        @hookimpl
        def attn_store(self, **kw):
            return None

    text = refusal(Bad())
    for fact in (
        "not decorated with @attn_core.hookimpl",
        "did you mean attn_decode?",
        "keyword-only parameters receive nothing",
        "a default would hide the argument",
        "variadic keyword parameters receive nothing",
        "attn_decode(inputs, layer, cache, metadata, out)",
    ):
        assert fact in text
    assert text.count("hook  ") == 6


def test_attributes_that_are_no_hooks() -> None:
    class Fine(Plain):
        attn_scale = 0.125

        def __init__(self):
            self.attn_layers = [1, 2]

        @property
        def extend(self):
            raise RuntimeError("touched")

    bind(Fine())

    class Partial(Plain):
        def __init__(self):
            self.attn_store = functools.partial(print)

    assert "is a partial, not a function or method" in refusal(Partial())


@pytest.mark.parametrize("backend", [None, 3, object(), Plain])
def test_objects_that_are_no_backends(backend: object) -> None:
    assert "does not fit the contract" in refusal(backend)


def test_required_hooks_of_the_other_kinds() -> None:
    assert "attn_ragged" in refusal(Plain(), of=manifest("mm"))
    assert "attn_ragged" in refusal(Plain(), of=manifest("mla", variant='roles = ["absorbed", "ragged"]'))
    assert "attn_index" in refusal(Plain(), of=manifest("dsa", variant='roles = ["index"]'))
    assert "attn_commit" in refusal(Plain(), "verify", of=manifest("gdn"))
    bind(Plain(), "decode", of=manifest("gdn"))
    assert "attn_ragged" in refusal(Plain(), of=manifest(allow='features = ["ragged"]\n'))
    text = refusal(Plain(), of=manifest(allow='graph = { level = "uniform_decode" }\n'))
    assert "attn_graph_state" in text
    assert "declares graph level uniform_decode" in text
    private = manifest(when='"format.name" = ["attn-toy:packed"]\n')
    assert "attn_gather" in refusal(Plain(), of=private)
    assert "the plugin's own" in refusal(Plain(), of=private)


def test_only_a_part_needs_only_its_hook() -> None:
    class Indexer:
        attn_metadata = Plain.attn_metadata

        @hookimpl
        def attn_index(self, inputs, layer, cache, metadata, out):
            return "indices"

    bound = bind(Indexer(), "prefill", "decode", of=manifest("dsa", variant='roles = ["index"]'))
    assert bound.attn_index(1, 2, 3, 4, 5) == "indices"
    with pytest.raises(BindError, match="does not implement attn_extend"):
        bound.attn_extend(1, 2, 3, 4, 5)


def test_errors_survive_processes() -> None:
    with pytest.raises(BindError) as caught:
        bind(object())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- defaults -----------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    from attn_core.store import default_gather, default_store

    bound = bind(Plain())
    assert bound.attn_store is default_store
    assert bound.attn_gather is default_gather
    assert bound.attn_metadata_in_graph("metadata") is None
    assert bound.attn_commit(1, 2, 3, 4, 5) is None
    assert bound.attn_warmup(1, 2, 3) is None
    for hook in ("attn_graph_state", "attn_ragged", "attn_index"):
        with pytest.raises(BindError, match=f"mha/toy:default does not implement {hook}"):
            getattr(bound, hook)(1, 2, 3)


def test_own_store_and_gather_win() -> None:
    class Own(Plain):
        @hookimpl
        def attn_store(self, inputs, layer, cache, address):
            return "stored"

    assert bind(Own()).attn_store(1, 2, 3, 4) == "stored"


def test_ragged_is_callable_like_extend() -> None:
    class Vision:
        attn_metadata = Plain.attn_metadata

        @hookimpl
        def attn_ragged(self, q, k, v, layer, metadata, part):
            assert part is None
            return q + k + v, None

    bound = bind(Vision(), "prefill", of=manifest("mm"))
    one = torch.ones(2, 1, 4)
    out = torch.zeros(2, 1, 4)
    result, lse = bound.attend_ragged(MmInputs(one, one, one), "layer", None, "metadata", out)
    assert result is out
    assert lse is None
    assert (out == 3).all()
    assert (bound.attend_ragged(MmInputs(one, one, one), "layer", None, "metadata", None)[0] == 3).all()


def draft_batch(table: bool = True) -> AttentionBatch:
    lens = torch.tensor([5, 9], dtype=torch.int32)
    ints = torch.zeros(2, 4, dtype=torch.int32)
    address = KvAddress(16, lens, torch.full((2,), -1), 9, table=ints if table else None, kv_lens_cpu=lens)
    segment = Segment("draft", slice(0, 2), slice(0, 2), 1)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    return AttentionBatch(2, 2, (segment,), offsets, 1, (address,), positions=torch.tensor([5, 9]))


def test_draft_steps_one_after_the_other() -> None:
    slots = torch.arange(6).reshape(2, 1, 3)
    steps: Any = bind(Plain()).attn_draft_metadata(draft_batch(), "group", DraftSteps(3, 1, slots), None)
    assert len(steps) == 3
    for number, (batch, group, phase, state, capture) in enumerate(steps):
        address = batch.kv(0)
        assert address.kv_lens.tolist() == [6 + number, 10 + number]  # the prefix, the drafts before it, and itself
        assert address.kv_lens_cpu.tolist() == address.kv_lens.tolist()
        assert address.max_kv_len == 10 + number
        assert address.new_slots.tolist() == slots[:, 0, number].tolist()
        assert batch.positions.tolist() == [5 + number, 9 + number]
        assert (group, phase, state, capture) == ("group", "draft", None, False)


def test_draft_steps_under_a_plain_graph_state_are_refused() -> None:
    """One GraphState cannot serve several steps: it gives one metadata object for one key."""
    slots = torch.zeros(2, 1, 2, dtype=torch.int64)
    with pytest.raises(GraphError, match="attn_draft_metadata") as caught:
        bind(Plain()).attn_draft_metadata(draft_batch(), "group", DraftSteps(2, 1, slots), "state")
    assert "draft=(steps, topk)" in str(caught.value)


def test_the_specification_and_bound_backends_agree() -> None:
    fields = {name for name in BoundBackend.__dataclass_fields__ if name.startswith("attn_")}
    assert fields == set(BACKEND_HOOKS) == {name for name in vars(BackendSpec) if name.startswith("attn_")}
