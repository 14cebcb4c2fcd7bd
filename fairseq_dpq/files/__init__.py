"""fairseq checkpoints as data: safe loading, DPQ tables inside them, compaction, whole writing.
No model is built here; the command line tools of fairseq_dpq.cli are made of these parts."""
