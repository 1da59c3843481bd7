"""Transformers' module on the meta device, and the hooks through which it gets weights and attention."""
