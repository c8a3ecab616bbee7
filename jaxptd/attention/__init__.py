"""Attention of one block of queries and keys, and the rings over which a sequence is sharded."""
