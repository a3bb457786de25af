"""Planted faults: each a small change to the right reference backend that some named check of the kit must catch.

They prove the kit, not a backend: ``core/tests/test_kit_mutants.py`` runs every fault against its check and the unmutated
reference against the same one. A fault that users really met carries their words in its name.
"""

from __future__ import annotations

from kit_faults._registry import FAULTS, Fault, caught, load_faults

__all__ = ["FAULTS", "Fault", "caught", "load_faults"]
