"""The target's forward: inputs, tree masks, positions, compiled steps."""
