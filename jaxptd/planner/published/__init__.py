"""Published rows, records of the programs that they ran, and predictions held against them."""
