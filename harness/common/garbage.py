"""Python's garbage collector, kept from looking at what stays."""

import gc

#: New objects after which Python looks for garbage. At its own 700, importing torch and transformers takes longer.
_RARELY = 50_000
_often = gc.get_threshold()


def collect_rarely() -> None:
    """Looks for garbage less often, until `leave_what_exists`: a command imports and loads."""
    gc.set_threshold(_RARELY)


def leave_what_exists() -> None:
    """Collects garbage once; what is left is not looked at any more. A collection of all that torch and transformers
    import takes a quarter of a second, and may otherwise begin amid any token."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_often)
