"""Models of images: their data, layers and families, and pictures of the classes they find."""
