"""One call for any PyTorch model: its embedding tables compressed in place, saved and loaded."""
