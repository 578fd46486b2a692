"""What the methods that draft with a head have in common."""
