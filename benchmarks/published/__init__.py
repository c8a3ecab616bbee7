"""Step times that others have published, and how well the planner predicts them."""
