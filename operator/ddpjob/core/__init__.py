"""Every decision about a job, as pure functions of frozen values. They neither do I/O nor use a
clock or random numbers.

`decide` maps a job, the observed world and the time to a `Decision`; `follow` works out what has
happened to the group's pods. The other packages are `failures` (why pods and groups failed, and
which response follows), `status` (what users read) and `plan` (which pods should exist, and which
actions create and delete them). In the following list, each package or module imports only later
entries: decide, follow, plan, status, failures, view, then volumes, decision and world. Outside
core, only `ddpjob.api` is imported.
"""
