"""Works out in stages what has happened to the group since the last reconcile.

Each stage takes the result of the previous one.
"""
