"""Decides why pods and groups failed, which failures count against the budget, and which hosts to
avoid.

The package imports `view`, `volumes`, `decision` and `world`, but nothing from `status` or `plan`.
"""
