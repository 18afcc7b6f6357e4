"""Control-plane faults on the test cluster, which the operator and jobs must survive."""
