"""Environments over HTTP and WebSocket: the server, and what both sides write on the wire."""
