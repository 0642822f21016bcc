"""Trained draft heads: one small block that drafts from the target's own hidden states (EAGLE-3 and its kin)."""
