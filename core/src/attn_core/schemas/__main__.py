"""``python -m attn_core.schemas`` writes the schema files anew after a change of the registries."""

from attn_core.schemas import write

write()
