"""Programs of the project's maintainers and users; also imported by tests and benchmarks."""
