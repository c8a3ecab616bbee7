"""A long run that is killed again and again, and must end with the curve of one that was not."""
