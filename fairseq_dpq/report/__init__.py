"""A report on checkpoints that can be looked at: a page of its own, figures and numbers."""
