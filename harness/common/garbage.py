"""Python's garbage collector, kept from looking at what stays."""

import gc


def leave_what_exists() -> None:
    """Collects garbage once; what is left is not looked at any more. A collection of all that torch and transformers
    import takes a quarter of a second, and may otherwise begin amid any token."""
    gc.collect()
    gc.freeze()
