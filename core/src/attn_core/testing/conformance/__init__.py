"""The conformance kit as tests: ``pytest --pyargs attn_core.testing.conformance --attn-backend mha/NAME [--device cuda]``."""
