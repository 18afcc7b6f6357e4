"""`ddpjob dashboard`: the jobs of a place as pages of a browser, read-only, in the words and numbers of `client`.

`fleet` follows the jobs, `job_views` makes from objects what pages show, `web_server` answers requests. What comes
from jobs (names, messages, logs) is text in every page: templates escape it, and scripts set it as text.
"""
