"""`ddpjob dashboard`: the jobs of a place as pages of a browser, read-only, in the words and numbers of `client`.

`fleet` follows the jobs, `job_views` makes from objects what pages show, `gate` says who may ask, `web_server` answers.
`viewers` is the gate of a dashboard in a cluster, where each viewer reads with a token of their own. What comes
from jobs (names, messages, logs) is text in every page: templates escape it, and scripts set it as text.
"""
