"""One file per format: its declared parameters and its rules."""
