"""The conformance kit: oracles, adversarial batches, checks, and the report that proves a backend right.

Importing this package loads neither torch nor pytest. What is inside:

==================  ======================================================================================
``oracle_mha`` …    slow, obvious float64 references, one module per kind, each with its formula and source
``batches``         makes adversarial cases: permuted and shared pages, NaN where nobody may read, strides
``spec``            what a case is made from: prints as the call that makes it
``strategies``      hypothesis strategies over cases
``compare``         error measures and tolerances, with messages that name the worst element
``harness``         runs one backend on one case, in the order every server follows
``checks``          the checks by name: numbers, masks, memory, steps, graphs, packed, router, device, states, latent
``cells``           every (check, variant, phase, types, page size) that a manifest declares, and how one runs
``conformance``     ``pytest --pyargs attn_core.testing.conformance --attn-backend mha/NAME``
``report``          ``run_verification``: what ``attn verify`` calls; JSON with every cell
``reference_*``     plain backends with all features: templates for a newcomer, subjects of the kit's own tests
``fake``            small distributions and recording backends for tests of discovery, planner and router
==================  ======================================================================================
"""

from __future__ import annotations
