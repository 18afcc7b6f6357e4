"""What has become of the group since the last reconcile, in stages.

Each stage takes what the previous one returns.
"""
