"""Training of the embedded pair (`python -m demos.train_embedded`)."""
