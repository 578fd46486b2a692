"""Files, transfers between devices, progress bars and the errors of commands."""
