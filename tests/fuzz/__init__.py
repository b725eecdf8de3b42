"""Input from elsewhere, mutated: each value is taken as it was meant, or refused by name.

A `Border` is a place where the product reads what another party has written. From a valid value, `mutations` makes one
that differs in one place; the border's real entry point takes it. It may refuse, by its own named errors; it may not
raise anything else, take long, take much memory, or give a value that its check does not accept. A new border is a
module in `borders/` with a `BORDERS`; `tests/unit/test_fuzz.py` finds where one is missing.
"""
