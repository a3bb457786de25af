"""The checks of the kit, by name. :data:`CHECKS` holds them all; :func:`checks_of` those of one kind.

A check belongs to features (all must be declared), to phases, and has a spread: how many of the declared combinations it runs
on. Its name is what a capability's ``tests`` refers to and what a failure quotes.
"""

from __future__ import annotations

from attn_core.testing.checks._registry import CHECKS, Check, checks_of

__all__ = ["CHECKS", "Check", "checks_of"]
