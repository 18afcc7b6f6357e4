"""Every decision about a job: pure functions over frozen values, without I/O, clock or randomness.

`decide` maps a job, the observed world and the time to a `Decision`; `group` follows what happened
to the group's pods. The rooms: `failures` (why something ended, and what follows), `status` (what
users read), `plan` (which pods there should be, and the actions that get there). Each imports only
what is below it: decide, group, plan, status, failures, view, then volumes, decision and world.
Outside of core, only `ddpjob.api` is imported.
"""
