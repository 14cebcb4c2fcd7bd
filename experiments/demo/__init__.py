"""The demo: a generated bilingual corpus and the run that compares full, DPQ-SX and DPQ-VQ tables
on it, through fairseq's own commands."""
