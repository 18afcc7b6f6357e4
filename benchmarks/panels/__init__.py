"""Pictures of the Grafana dashboards, drawn from a run with faults on the test cluster."""
