"""The coordinator of one job: admits members, forms rounds of them, finds the first cause of a break, reports.

The decisions use no sockets, and the clock is passed in; `__main__` adds sockets and time.
Standard library only.
"""
