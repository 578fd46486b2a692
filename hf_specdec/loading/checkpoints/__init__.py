"""What the folder of a checkpoint holds."""
