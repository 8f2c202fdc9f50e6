"""y = x W^T + b for packed W: reference maths, operators and the dispatcher."""
