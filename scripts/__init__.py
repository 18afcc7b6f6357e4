"""Programs for the project's maintainers and users, which tests and benchmarks also import."""
