"""Training runs over a grid of K, D, method and sharing: `fairseq-dpq-sweep`."""
