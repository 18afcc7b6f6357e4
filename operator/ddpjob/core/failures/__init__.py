"""Why pods and groups failed: causes, which ones are first, which count, and which hosts to avoid.

Imports `view`, `volumes`, `decision` and `world`; nothing of `status` or `plan`.
"""
