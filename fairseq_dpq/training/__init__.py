"""How codes are assigned and learned: k-means, statistics, the start of a table."""
