"""The page kernel in Triton's interpreter, in a process of its own: the interpreter is chosen before any kernel is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# not imported here: in this process the interpreter may be wanted later, and is chosen by whoever imports triton first
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

PROGRAM = """
import torch
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import make_case
from attn_flashinfer import pages
from attn_flashinfer.lengths import lengths_of

checked = 0
for form in ("table", "csr"):
    for page in (1, 4, 12):
        for window, trimmed in ((0, False), (5, False), (5, True)):
            geometry = MhaGeometry(4, 2, 16, 16, 0.3, window=window or None)
            fields = dict(query_lens=(3, 1, 0, 5), kv_lens=(9, 40, 7, 33), page_size=page, form=form, dtype="fp32")
            case = make_case(geometry, "prefill", **fields)
            if trimmed:
                origins = tuple(case.spec.latest_origin(row) for row in range(4))
                case = make_case(geometry, "prefill", **fields, origins=origins)
            address = case.batch.kv(case.pool_index)
            lengths = lengths_of(case.batch, address, window, padded=False)
            want = torch.full((lengths.pages + 3,), -7, dtype=torch.int32)
            have, last = want.clone(), torch.full((5,), -7, dtype=torch.int32)
            pages._gather(address, lengths, want)
            pages._launch(address, lengths, have, None, last)
            assert have.tolist() == want.tolist(), (form, page, window, trimmed)
            assert last.tolist() == [*lengths.last_page.tolist(), -7], (form, page, window, trimmed)
            untouched = torch.full_like(want, -7)
            pages._launch(address, lengths, untouched, None, None)
            assert untouched.tolist() == want.tolist()
            checked += 1
print("checked", checked)
"""


def test_pages_and_last_pages_are_those_of_the_host():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "checked 18" in done.stdout
