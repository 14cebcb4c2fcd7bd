"""The paper's tables: which rows they have, how each is made, and the figures beside the paper's.
It runs the recipes and the commands of this package, and imports no other folder."""
