"""What runs inside the pods of a job, in any image: the coordinator, its store, and the launcher with its workers.

Needs Python 3.9 or later and its standard library; the launcher and the store also need torch. Job pods find the
package in a ConfigMap that is mounted at /opt/ddpjob. `protocol` is all that coordinator, launcher and operator share.
"""
