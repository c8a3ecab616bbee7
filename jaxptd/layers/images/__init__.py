"""Layers of models of images: patches, windows of them, and losses of pixels."""
