"""attn-sglang: any installed attn-core backend serves in SGLang.

SGLang finds the entry point ``attn_core`` of the group ``sglang.srt.plugins`` and calls :func:`attn_sglang.plugin.register`;
nobody has to import this package. Importing it loads neither torch nor SGLang.
"""

from __future__ import annotations

__version__ = "0.1.0"

#: Versions of SGLang that this bridge is tested with. Any other one is refused when a backend is asked for.
SUPPORTED_SGLANG = ("0.5.23",)

#: The name under which attn-core chooses the backends itself (``--attention-backend attn_core``).
ROUTER = "attn_core"

#: Put before a backend's name, so that no name of SGLang's own is taken (``--attention-backend attn-triton``).
PREFIX = "attn-"

__all__ = ["PREFIX", "ROUTER", "SUPPORTED_SGLANG"]
