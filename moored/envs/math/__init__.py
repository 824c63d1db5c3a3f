"""Word problems with a checked answer."""
