"""Train a draft head on what the target itself writes: dialogues, features, loss, the loop, export."""
