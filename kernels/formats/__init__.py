"""One file per format: its reference maths and what can run it."""
