"""Bytes at rest: safetensors container, chunk hashes, build journal, and checks of an artifact."""
