"""Attention of one block of queries and keys, and who holds which block of a sequence."""
