"""Transformers' module on the meta device, and the hooks through which it gets weights and attention."""

from engines.common.lean_transformers import import_transformers

import_transformers()  # before a module of this package imports of it
