"""Commands and what they are made of; the core imports nothing from here."""
