"""The coordinator of one job: admits members, forms rounds of them, finds the first cause of a break, reports.

All decisions are made without sockets and with a clock that is handed in; `__main__` adds sockets and time.
Standard library only.
"""
