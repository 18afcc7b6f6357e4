"""The process backend: runs one job on this machine.

Process groups serve as pods, and files as the job's record. It imports `engine`, `objects`, `core`
and `api`, but never `controller` or `cli`.
"""
