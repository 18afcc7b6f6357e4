"""The process backend: runs one job on this machine.

Process groups serve as pods, and files hold the job's record. This package imports `engine`,
`objects`, `core` and `api`, but never `controller` or `cli`.
"""
