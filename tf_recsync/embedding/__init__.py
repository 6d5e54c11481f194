"""Embedding tables: what they are, where they are placed, and how ids find their rows."""
