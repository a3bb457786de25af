"""Speculative greedy decoding through attn-core: chains and trees of drafts, verified by the plan's verify phase.

``attn speculate`` is the command; :func:`attn_transformers.speculative.build.build` makes a :class:`Speculator` for any
decoder-only model. Importing this package loads neither torch nor transformers.
"""
