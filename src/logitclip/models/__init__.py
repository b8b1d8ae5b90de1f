"""Networks by name; each returns logits."""
