"""The process backend: runs one job on this machine, with process groups as pods and files as its record.

Imports `engine`, `objects`, `core` and `api`; never `controller` or `cli`.
"""
