"""`ddpjob dashboard`: read-only web pages about the jobs on a cluster or on this machine.

The pages use the words and numbers of `client`. `fleet` follows the jobs, `job_views` shapes
objects for the pages, `gate` decides who has access, and `web_server` serves the pages. `viewers`
is the gate of a dashboard in a cluster, where each viewer reads with their own token. Texts from
jobs (names, messages, logs) remain text in every page: templates escape them, and scripts set them
as text.
"""
