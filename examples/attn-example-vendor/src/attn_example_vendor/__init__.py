"""attn-example-vendor: the plugin's hooks. Importing this package loads no torch; ``attn_create`` does."""

from __future__ import annotations

from attn_core import Context, Manifest, hookimpl

__version__ = "0.3.0"


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> object:
    """A backend object for one layer group; its options come with the plan, validated by the manifest's schema."""
    from attn_example_vendor.backend import StreamingAttention

    return StreamingAttention(context)
