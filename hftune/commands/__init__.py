"""The commands of ``hftune``, one module each: ``add_arguments(parser)`` and ``run(options)``, which returns the exit code.

Nothing here imports torch until the arguments have been checked.
"""
