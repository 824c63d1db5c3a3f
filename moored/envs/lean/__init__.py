"""Proofs in Lean 4, checked by a Kimina-compatible server."""
