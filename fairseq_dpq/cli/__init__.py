"""The command line tools: compact, inspect, export, quantize and hydra-train with the plugin."""
