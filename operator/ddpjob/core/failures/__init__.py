"""Why pods and groups failed: causes, which ones came first, which count, and which hosts to avoid.

Imports `view`, `volumes`, `decision` and `world`, but nothing from `status` or `plan`.
"""
