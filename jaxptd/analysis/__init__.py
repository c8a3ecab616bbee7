"""What a program moves, holds and computes, counted and by formula."""
