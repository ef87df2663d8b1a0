"""What a node of a graph costs, and the table of it."""
