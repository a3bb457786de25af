"""Runs in every process of the server under test: stands in for packages that have no build for this machine.

``torchvision`` and ``torchaudio`` (their PyPI wheels do not match a CPU build of torch) and ``sgl_kernel`` (no CPU build is
published) become modules whose members can be named and not called. The few CPU operators of ``sgl_kernel`` that n-gram
speculation needs are written in torch, in ``sgl_kernel_cpu``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

ROOTS = ("torchvision", "torchaudio", "sgl_kernel")
WRITTEN = frozenset(
    {
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "reconstruct_indices_from_tree_mask",
        "verify_tree_greedy_cpu",
    }
)


class Named:
    """A member of a stubbed package: it has a name and members, and calling it is an error."""

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        """Say so, and fail."""
        text = f"{self.__name__} is a stub of the test environment"
        print(text, file=sys.stderr, flush=True)  # the server's process may be killed before its traceback is out
        raise RuntimeError(text)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self.__name__}.{name}")


class Stub(types.ModuleType):
    """A stubbed module."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in WRITTEN and self.__name__.startswith("sgl_kernel"):
            import sgl_kernel_cpu

            return getattr(sgl_kernel_cpu, name)
        return Named(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a stub of every module below the stubbed packages."""

    def find_spec(self, name, path=None, target=None):
        """A stub for every module below :data:`ROOTS`."""
        if name.partition(".")[0] in ROOTS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """An empty package."""
        module = Stub(spec.name)
        module.__path__ = []
        module.__version__ = "0.0"
        return module

    def exec_module(self, module):
        """Nothing to run."""


sys.meta_path.append(Finder())
