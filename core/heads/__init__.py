"""Trained draft heads (EAGLE-3 and its kin): one layer that reads the target's hidden states and drafts from them."""
