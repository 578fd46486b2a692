"""`generate_many`, and one batch that several threads give prompts to."""
