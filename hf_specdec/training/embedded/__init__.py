"""Training of the embedded pair (`python -m hf_specdec.training.embedded`)."""
