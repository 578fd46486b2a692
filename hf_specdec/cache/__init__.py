"""Keys and values: a length per row, rollback, static buffers, recurrent states."""
