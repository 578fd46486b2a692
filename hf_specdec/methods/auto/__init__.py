"""Auto: one predictor over all sources."""
