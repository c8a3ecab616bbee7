"""This library's own steps: their time, traffic and memory from a config, without jax."""
