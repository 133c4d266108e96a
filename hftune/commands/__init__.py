"""Bodies of the ``hftune`` command that work on finished runs."""
