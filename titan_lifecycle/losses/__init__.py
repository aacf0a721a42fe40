"""Chunked losses whose inner backwards are scoped."""
