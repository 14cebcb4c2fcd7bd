"""What several test files use; found through pythonpath in pyproject.toml."""
