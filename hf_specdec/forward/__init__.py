"""The target's and the draft's forwards: inputs, tree masks, positions."""
