"""From a Hugging Face checkpoint to an artifact: read, slice, quantise, pack, hash, write."""
