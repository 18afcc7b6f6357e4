"""One job's coordinator: admits members, forms rounds, finds the first cause of breaks, reports.

The decisions do not use sockets, and the clock is passed in; `__main__` adds sockets and time. Only
the standard library is needed.
"""
