"""What a job's pods print and what their ranks are doing."""
