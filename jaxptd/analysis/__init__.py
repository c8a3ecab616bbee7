"""What a program communicates, keeps and computes: counted in it, and predicted by formula."""
