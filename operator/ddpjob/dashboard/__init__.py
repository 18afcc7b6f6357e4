"""`ddpjob dashboard`: the jobs of a place as pages of a browser, read-only.

It uses the words and numbers of `client`. `fleet` follows the jobs, `job_views` shapes objects for
the pages, `gate` decides who may ask, and `web_server` answers. `viewers` is the gate of a
dashboard in a cluster, where each viewer reads with their own token. Texts of jobs (names,
messages, logs) are text in every page: templates escape them, and scripts set them as text.
"""
