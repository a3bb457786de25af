"""Every member of SGLang's base class is answered by the bridge itself; the server suite compares the list with the wheel."""

from __future__ import annotations

import pytest

from attn_sglang import SUPPORTED_SGLANG
from attn_sglang.backend import CoreBackend, make_class
from attn_sglang.members import MEMBERS


def test_every_supported_version_has_its_list():
    assert set(MEMBERS) == set(SUPPORTED_SGLANG)


@pytest.mark.parametrize("version", SUPPORTED_SGLANG)
def test_no_member_is_left_to_the_base_class(version):
    assert len(MEMBERS[version]) == len(set(MEMBERS[version])) == 46
    missing = [name for name in MEMBERS[version] if name not in vars(CoreBackend)]
    assert not missing


def test_the_base_class_stands_behind_and_answers_nothing():
    def inherited(self, *args, **kwargs):
        raise AssertionError("the base class was asked")

    base = type("Base", (), dict.fromkeys(MEMBERS[SUPPORTED_SGLANG[-1]], inherited))
    made = make_class(base)
    assert issubclass(made, base)
    assert made is make_class(base)
    assert [name for name in MEMBERS[SUPPORTED_SGLANG[-1]] if getattr(made, name) is inherited] == []
