"""What one call asks for."""
