"""Classes that a trained model of images finds: of which images, and as PNG files."""
