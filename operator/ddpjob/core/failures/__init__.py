"""Why pods and groups failed: causes, which of them are first causes, whether they count, and which hosts to avoid.

Imports `view`, `volumes`, `decision` and `world`; nothing of `status` or `plan`.
"""
