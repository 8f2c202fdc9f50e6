"""V3 nodes: read inputs, call the rooms, show the result."""
