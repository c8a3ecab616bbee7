"""The processes of a run: finding, joining, stopping and watching them."""
