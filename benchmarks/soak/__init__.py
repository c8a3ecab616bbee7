"""A long run that is killed over and over, and must end with the curve of an undisturbed one."""
