"""``python -m attn_core`` is the ``attn`` command, for environments whose scripts are not on the path."""

from attn_core.cli import main

main()
