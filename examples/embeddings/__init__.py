"""MiniLM sentence embeddings with real weights: a padded dimension under an attention mask."""
