"""The conformance kit: oracles, adversarial batches, checks, and the report that proves a backend right.

Importing this package loads neither torch nor pytest. What is inside:

==================  ======================================================================================
``oracle_mha`` …    slow, obvious float64 references, one module per kind, each with its formula and source
``batches``         makes adversarial cases: permuted and shared pages, NaN where nobody may read, strides
``compare``         error measures and tolerances, with messages that name the worst element
``harness``         runs one backend on one case, in the order every server follows
``conformance``     ``pytest --pyargs attn_core.testing.conformance --attn-backend mha/NAME``
``report``          ``run_verification``: what ``attn verify`` calls; JSON with every cell
``reference_backend``  a plain backend with all features: the template for a newcomer, the subject of the kit's own tests
``fake``            small distributions and recording backends for tests of discovery, planner and router
==================  ======================================================================================
"""

from __future__ import annotations
