"""What transformers calls: one attention function and one mask function, registered under one name.

The attention function finds the bridge that a module is bound to and hands the call over. The mask function builds no
mask: causality, windows and chunks come with the layer's group and padding is left out of the ragged batch, so it passes
on the plain 2-D padding mask. Without a mask function of the same name transformers passes no padding information at all,
and left-padded rows would silently be wrong.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from attn_core.errors import BatchError, BindError, UsageError

#: The default name in ``attn_implementation=…``.
NAME = "attn_core"
#: Attribute of an attention module that holds the bridge which serves it.
BRIDGE = "_attn_core_bridge"


class Bridge(Protocol):
    """Who serves the attention modules of a model: the paged cache of attn-core, or transformers' page pool."""

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Attend for one module: query ``[B, Hq, S, D]`` to output ``[B, S, Hq, Dv]``."""


def attn_core_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: query ``[B, Hq, S, D]``, key and value ``[B, Hk, S, D]`` (the new tokens only)."""
    bridge: Bridge | None = getattr(module, BRIDGE, None)
    if bridge is None:
        raise BindError(
            f"{type(module).__name__} is not bound to attn-core",
            "this attention implementation needs a plan, a router and a paged cache",
            fix="model = attn_transformers.load(model)",
        )
    return bridge.attention(module, query, key, value, attention_mask, kwargs), None


def attn_core_mask(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **_: Any,
) -> torch.Tensor | None:
    """The mask function: the padding mask ``[B, keys]`` as it is, or None when nothing is padded.

    Raises :class:`BatchError` for masks that a batch cannot express: bidirectional blocks, packed sequences, and mask
    functions given by the model or the user.
    """
    if use_vmap or not allow_is_causal_skip:
        raise BatchError(
            "the model asks for an attention mask that is more than causal, windowed or padded",
            "bidirectional blocks, packed sequences and custom mask functions have no form in this bridge",
            fix='attn_implementation="sdpa" for this input',
        )
    return attention_mask


def check_name(name: str) -> None:
    """Refuse names that transformers gives a meaning of its own. Raises :class:`UsageError`."""
    traps = {"flash": "goes to the flash-attention loader", "/": "is a kernel of the Hub", "|": "is a prefix"}
    for part, meaning in traps.items():
        if part in name:
            raise UsageError(f"{name!r} cannot be registered: in transformers a name with {part!r} {meaning}")


def register(name: str = NAME) -> str:
    """Register attention *and* mask under `name`; idempotent. Returns the name.

    Raises :class:`UsageError` for a name that somebody else has registered (transformers would silently overwrite it) or
    that transformers treats in a special way.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_name(name)
    for interface, function in ((AttentionInterface, attn_core_attention), (AttentionMaskInterface, attn_core_mask)):
        known = interface._global_mapping.get(name)
        if known is not None and known is not function:
            raise UsageError(f"attention implementation {name!r} is registered already, by {known.__module__}")
        interface.register(name, function)
    return name
