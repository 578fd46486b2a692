"""Entry points: `enable`, `decode`, `SpecGenerationMixin` and `generate_many`."""
