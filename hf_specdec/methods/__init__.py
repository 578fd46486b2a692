"""One folder per method: its configuration, its drafter and its entry for the registry."""
