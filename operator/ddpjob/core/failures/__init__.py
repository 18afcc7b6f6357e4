"""Why pods and groups failed: the first cause, whether it counts, and which hosts to avoid.

The package imports `view`, `volumes`, `decision` and `world`, but nothing from `status` or `plan`.
"""
