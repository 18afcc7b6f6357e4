"""Draws pictures of the Grafana dashboards from a run with faults on the test cluster."""
