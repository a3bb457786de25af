"""attn-vllm: any installed attn-core backend serves vLLM's attention layers.

vLLM calls :func:`register` in each of its processes. Unless the user asks for a backend (``ATTN_BACKEND=…``, or
``--additional-config '{"attn": …}'``, or ``--attention-backend CUSTOM``) nothing else happens: attn-core is not imported.
"""

from __future__ import annotations

import logging

__version__ = "0.1.0"
__all__ = ["SUPPORTED", "register"]

#: Series of vLLM that this version was tested with.
SUPPORTED = ("0.32",)


def register() -> None:
    """Entry point ``vllm.general_plugins``. Idempotent; never raises, because vLLM would die of it in every process."""
    try:
        from attn_vllm._install import install

        install()
    except Exception:
        logging.getLogger("vllm.attn_vllm").exception("attn-vllm could not be installed into vLLM")
