"""What joins the DPQ layer to fairseq; `plugin.register()` puts it in place."""
