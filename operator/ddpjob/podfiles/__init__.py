"""The files that run inside job pods, mounted at /opt/ddpjob and run by path: flat files that import each other by name."""
