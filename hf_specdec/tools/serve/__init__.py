"""An OpenAI-compatible server: requests share one batch, which a new request joins while others are decoded."""
