"""From the arguments of `generate` to a prepared call, through transformers' own `generate`."""
