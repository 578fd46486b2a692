"""From the arguments of `generate` to one plan, and the plan carried out."""
