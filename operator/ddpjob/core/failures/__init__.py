"""Decides why pods and groups failed, whether the failures count, and which hosts to avoid.

The package imports `view`, `volumes`, `decision` and `world`, but nothing from `status` or `plan`.
"""
