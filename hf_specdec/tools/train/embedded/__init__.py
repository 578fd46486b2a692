"""Training of the embedded pair (`python -m hf_specdec.tools.train.embedded`)."""
