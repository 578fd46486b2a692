"""Weights of the embedded models, which `hf_specdec.embedded.path` reads."""
