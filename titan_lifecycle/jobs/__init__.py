"""Job files: read, laid over a registry config, checked, and printed again."""
